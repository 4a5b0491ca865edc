"""Micro-batches out of any dataset, with a cursor that a resume goes back to."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.base.seeds import derive_seed
from whimbrel.data import TokenDataLoader, read_manifest
from whimbrel.models import IGNORE_INDEX
from whimbrel.train.passes import IndexedPass, StreamedPass, seeded, state_is_exact
from whimbrel.train.settings import LoaderConfig
from whimbrel.train.translate import TABLE

__all__ = [
    "Batches",
    "DatasetBatches",
    "LoaderBatches",
    "TokenBatches",
    "collate",
    "held_out",
    "make_batches",
    "token_count",
]

Collate = Callable[[list[Any]], Any]
SAMPLED_TOKENS = 65536
"""Number of tokens at each end of a stream that are hashed to identify it."""
SAMPLED = 8
"""Number of examples that are hashed to identify a dataset."""
DEFAULT_BATCH_SIZE = 8
"""Default batch size of the training arguments; a DataLoader's own size takes precedence over it."""


class Batches(Protocol):
    """Where micro-batches come from."""

    def begin(self, epoch: int) -> None:
        """Go to the start of a pass, or stay where a resume has put the cursor in it."""

    def next_batch(self) -> Any | None:
        """The next one, on the device; None where the pass has ended."""

    def exhausted(self) -> bool:
        """Whether the pass has ended."""

    def steps_for(self, epochs: float, accumulation: int) -> int:
        """Optimizer steps that so many passes take."""

    @property
    def epoch(self) -> float:
        """Passes done, with the part of the one under way."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a cursor."""


class TokenBatches:
    """Token shards: a cyclic stream, so a step may cross from one pass into the next, and ends the one it began in."""

    def __init__(self, loader: TokenDataLoader, device: torch.device) -> None:
        self.loader, self.device = loader, device
        self._pass = 0

    def begin(self, epoch: int) -> None:
        """The stream goes on; the pass ends where it crosses into a further one."""
        self._pass = max(epoch, self.loader.epoch)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        x, y = self.loader.next_batch()
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def exhausted(self) -> bool:
        """Whether the stream has crossed into a further pass."""
        return self.loader.epoch > self._pass

    def steps_for(self, epochs: float, accumulation: int) -> int:
        """Whole steps that cover so many passes."""
        loader = self.loader
        tokens = accumulation * loader.B * loader.T * loader.world_size
        return max(1, -int(-epochs * loader.total_tokens // tokens))

    @property
    def epoch(self) -> float:
        """Tokens read over tokens there are."""
        return self.loader.position / self.loader.total_tokens

    def state_dict(self) -> dict[str, Any]:
        """The loader's cursor, and hashes that identify its tokens."""
        return self.loader.state_dict() | self._identity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a cursor of the same stream."""
        kinds = {"tokenizer": "shards of another tokenizer", "tokens": "shards with other tokens"}
        for name, kind in kinds.items():
            theirs, ours = state.get(name), self._identity[name]
            if theirs is not None and ours is not None and theirs != ours:
                raise DataError(
                    f"{self.loader.root} has {kind} than the checkpoint was trained on ({name} {ours[:12]}, there "
                    f"{theirs[:12]}): resume with the same data, or choose another output_dir"
                )
        self.loader.load_state_dict(state)

    @cached_property
    def _identity(self) -> dict[str, str | None]:
        """Hashes of the tokenizer, where a manifest names it, and of the tokens at both ends of the stream."""
        stream, manifest = self.loader.stream, read_manifest(self.loader.root)
        count, digest = min(SAMPLED_TOKENS, len(stream)), hashlib.sha256()
        for start in (0, len(stream) - count):
            tokens = np.empty(count, stream.dtype)
            stream.copy(start, tokens)
            digest.update(tokens.astype(np.uint32).tobytes())
        tokenizer = None if manifest is None else manifest.tokenizer.fingerprint
        return {"tokenizer": tokenizer, "tokens": digest.hexdigest()}


class DatasetBatches:
    """A dataset of dicts or pairs, indexed (shuffled anew in each pass, from the seed) or iterable (in its order).

    Random numbers that examples or the collator draw come from the seed, the pass and the number of the batch: whoever
    fetches it, ahead or after a resume, gets the same batch, and the run's own generators are left alone.
    """

    def __init__(
        self, dataset: Any, batch_size: int, device: torch.device, *,
        collate: Collate, seed: int = 0, shuffle: bool = True, loader: LoaderConfig,
    ) -> None:  # fmt: skip
        self.dataset, self.batch_size, self.device = dataset, batch_size, device
        self.indexed = not isinstance(dataset, IterableDataset) and all(
            hasattr(dataset, name) for name in ("__getitem__", "__len__")
        )
        self._collate, self._seed, self._shuffle, self._loader = collate, seed, shuffle, loader
        self._epoch, self._taken, self._iterated = 0, 0, 0
        self._batches: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self._cursor: dict[str, Any] | None = None
        if isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"a {type(dataset).__name__} can be read once only, and each pass begins anew: give a list, or an "
                "object whose __iter__ makes a new iterator"
            )
        if not self.indexed and loader.workers > 1 and not hasattr(dataset, "num_shards"):
            raise ConfigError(
                f"an iterable dataset gives each of {loader.workers} workers every example: set dataloader_num_workers "
                "(loader.workers) to 0 or 1, or give one that shards itself and says so by num_shards"
            )
        if self.sized and len(self) == 0:
            remedy = "turn dataloader_drop_last off, or give more" if len(dataset) else "give some"
            raise DataError(f"the dataset has {len(dataset)} examples, less than one batch of {batch_size}: {remedy}")

    @property
    def sized(self) -> bool:
        """Whether the length of a pass is known."""
        return hasattr(self.dataset, "__len__")

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError(f"a {type(self.dataset).__name__} has no length")
        count, rest = divmod(len(self.dataset), self.batch_size)
        return count + (rest > 0 and not self._loader.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """One pass from its start."""
        self.rewind()
        self.begin(self._iterated)
        while (batch := self.next_batch()) is not None:
            yield batch

    def first_example(self) -> Any | None:
        """The first example, where there is one without beginning a pass."""
        if not self.indexed:
            return None
        with seeded(derive_seed(self._seed, "first")):
            return self.dataset[0]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to iterate over, as for a DistributedSampler."""
        self._iterated = epoch

    def rewind(self) -> None:
        """Go to the start of the first pass."""
        self._epoch, self._taken, self._batches, self._cursor = 0, 0, None, None
        self._ahead.clear()

    def begin(self, epoch: int) -> None:
        """Start the pass, unless the cursor is in it already."""
        if epoch != self._epoch:
            self._epoch, self._taken, self._batches, self._cursor = epoch, 0, None, None
            self._ahead.clear()

    def next_batch(self) -> Any | None:
        """The next micro-batch, or None at the end of the pass."""
        if self.exhausted():
            return None
        self._taken += 1
        return to_device(self._ahead.pop(), self.device)

    def exhausted(self) -> bool:
        """Whether the pass has ended; fetches the next batch to know."""
        if not self._ahead:
            batches = self._open() if self._batches is None else self._batches
            self._cursor = self._dataset_state()
            self._ahead = list(itertools.islice(batches, 1))
        return not self._ahead

    def steps_for(self, epochs: float, accumulation: int) -> int:
        """Optimizer steps of so many passes; what is left over at the end of a pass makes a step too."""
        if not self.sized:
            raise ConfigError("the length of an iterable dataset is not known: give max_steps (train.steps)")
        return max(1, -int(-epochs * -(-len(self) // accumulation) // 1))

    @property
    def epoch(self) -> float:
        """Passes done and the part of this one; only whole passes where the length is not known."""
        return self._epoch + (self._taken / len(self) if self.sized else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Which pass, how many batches of it were used, and the dataset's own state where it has one."""
        state: dict[str, Any] = {"epoch": self._epoch, "taken": self._taken, "batch_size": self.batch_size}
        state |= self._identity()
        if self._fingerprint is not None:
            state["fingerprint"] = self._fingerprint
        own = self._cursor if self._ahead else self._dataset_state()
        return state if own is None else state | {"dataset": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a cursor; another batch size is taken up at the example where the saved one stopped, or refused."""
        remedy = "resume with the same data and seed, or with resume_skip=('dataset',) (--resume.skip=dataset)"
        for name, value in self._identity().items():
            if state.get(name, value) != value:
                raise DataError(
                    f"expected a dataset with {name} = {state[name]} as in the checkpoint, got {value}: {remedy}"
                )
        theirs, ours = state.get("fingerprint"), self._fingerprint
        if theirs is not None and ours is not None and theirs != ours:
            raise DataError(f"the examples of this dataset differ from those the checkpoint was trained on: {remedy}")
        examples = state["taken"] * state["batch_size"]
        if examples % self.batch_size:
            raise DataError(
                f"the checkpoint is {examples} examples into its pass, which is no multiple of the batch size "
                f"{self.batch_size}: go on with {state['batch_size']}"
            )
        self.rewind()
        self._epoch, self._taken = int(state["epoch"]), examples // self.batch_size
        if self._keeps_state and "dataset" in state:
            self._cursor = state["dataset"]

    def _identity(self) -> dict[str, int]:
        """What the order of a pass follows from; a cursor means another place where it differs."""
        return {"examples": len(self.dataset), "seed": self._seed} if self.indexed else {"seed": self._seed}

    @cached_property
    def _fingerprint(self) -> str | None:
        """A hash of a few evenly spaced examples; None if they cannot be read ahead or differ on every read.

        The global random generators are seeded here, for datasets that use them to build an example.
        """
        if not self.indexed:
            return None
        last, digests = len(self.dataset) - 1, []
        places = sorted({round(last * part / (SAMPLED - 1)) for part in range(SAMPLED)})
        for _ in range(2):
            with seeded(derive_seed(self._seed, "fingerprint")):
                digests.append([_digest(self.dataset[place]) for place in places])
        if digests[0] != digests[1] or None in digests[0]:
            return None
        return hashlib.sha256("".join(map(str, digests[0])).encode()).hexdigest()[:16]

    @property
    def _keeps_state(self) -> bool:
        """A dataset's own state is right where it is exact, and no worker process reads ahead of us."""
        stateful = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
        return not self.indexed and stateful and self._loader.workers == 0 and state_is_exact(self.dataset)

    def _dataset_state(self) -> dict[str, Any] | None:
        if self._batches is None:
            return self._cursor
        return self.dataset.state_dict() if self._keeps_state else None

    def _open(self) -> Iterator[Any]:
        """Batches from the cursor on."""
        workers, seed = self._loader.workers, derive_seed(self._seed, "batches", self._epoch)
        shared: dict[str, Any] = {
            "batch_size": None, "collate_fn": _as_it_is, "num_workers": workers,
            "pin_memory": self._loader.pin_memory and self.device.type == "cuda",
            "prefetch_factor": self._loader.prefetch_factor if workers else None,
            "generator": torch.Generator().manual_seed(seed),
        }  # fmt: skip
        if self.indexed:
            batches = IndexedPass(self.dataset, self._order(), self._collate, seed)
            self._batches = iter(DataLoader(batches, sampler=range(self._taken, len(self)), **shared))
            return self._batches
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._epoch)
        first = 0
        if self._cursor is not None:
            self.dataset.load_state_dict(self._cursor)
            first = self._taken
        stream = StreamedPass(self.dataset, self.batch_size, self._loader.drop_last, self._collate, seed, first)
        self._batches = itertools.islice(iter(DataLoader(stream, **shared)), self._taken - first, None)
        return self._batches

    def _order(self) -> list[list[int]]:
        """The examples of each batch of this pass."""
        count = len(self.dataset)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "epoch", str(self._epoch)))
        order = torch.randperm(count, generator=generator).tolist() if self._shuffle else list(range(count))
        return [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(len(self))]


class LoaderBatches(DatasetBatches):
    """A user's DataLoader, or any iterable that yields the batches of one epoch each time it is iterated.

    It determines its own order. Without a generator of its own, it is seeded per epoch and batch, so that a resumed run
    repeats the order; otherwise the state of its generator is part of the cursor. Resuming reads and skips the batches
    that were already used.
    """

    def __init__(self, batches: Any, device: torch.device, *, seed: int) -> None:
        if isinstance(batches, Iterator) or not hasattr(batches, "__iter__"):
            raise ConfigError(
                f"expected a DataLoader, or an iterable that can be iterated once per epoch, got "
                f"{type(batches).__name__}: return a torch.utils.data.DataLoader"
            )
        self.dataset, self.device, self.indexed = batches, device, False
        self.batch_size = getattr(batches, "batch_size", None) or 1
        self._seed, self._loader = seed, LoaderConfig()
        self._epoch, self._taken, self._iterated = 0, 0, 0
        self._batches, self._ahead, self._cursor = None, [], None
        self._start: list[Tensor] = []
        if self.sized and len(self) == 0:
            raise DataError(f"expected batches, got a {type(batches).__name__} of length 0: add data")

    @property
    def sized(self) -> bool:
        """Whether the number of batches is known."""
        try:
            len(self.dataset)
        except TypeError:
            return False
        return True

    def __len__(self) -> int:
        return len(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and the state of the loader's own generators at the start of the epoch."""
        begun = self._start if self._batches is not None else [one.get_state() for one in self._generators()]
        return super().state_dict() | ({"generators": begun} if begun else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a cursor."""
        super().load_state_dict(state)
        for generator, begun in zip(self._generators(), state.get("generators", ()), strict=True):
            generator.set_state(torch.as_tensor(begun, dtype=torch.uint8))

    def _identity(self) -> dict[str, int]:
        return {"batches": len(self), "seed": self._seed} if self.sized else {"seed": self._seed}

    _fingerprint = None  # examples cannot be read ahead

    @property
    def _keeps_state(self) -> bool:
        return False

    def _open(self) -> Iterator[Any]:
        """Batches from the cursor on."""
        self._start = [generator.get_state() for generator in self._generators()]
        for part in (self.dataset, *(getattr(self.dataset, name, None) for name in ("dataset", "sampler"))):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
        self._batches = itertools.islice(self._seeded_pass(), self._taken, None)
        return self._batches

    def _seeded_pass(self) -> Iterator[Any]:
        seed = derive_seed(self._seed, "batches", self._epoch)
        with seeded(seed):
            batches = iter(self.dataset)
        for number in itertools.count():
            with seeded(derive_seed(seed, number)):
                found = list(itertools.islice(batches, 1))
            if not found:
                return
            yield found[0]

    def _generators(self) -> list[torch.Generator]:
        """The generators of a DataLoader and its samplers, without duplicates."""
        sampler = getattr(self.dataset, "sampler", None)
        holders = (self.dataset, sampler, getattr(self.dataset, "batch_sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def make_batches(
    dataset: Any, batch_size: int | None, device: torch.device, *,
    collate: Collate, seed: int, shuffle: bool, loader: LoaderConfig,
) -> TokenBatches | DatasetBatches:  # fmt: skip
    """The batches of whatever was given as a dataset; a token loader has its own size, any other needs one."""
    if isinstance(dataset, TokenDataLoader):
        if batch_size not in (None, dataset.B):
            raise ConfigError(
                f"the token loader gives batches of B = {dataset.B} and the batch size is set to {batch_size}: make "
                "them equal"
            )
        _refuse_settings(loader, "a token loader, which reads ahead by itself")
        return TokenBatches(dataset, device)
    assert batch_size is not None
    if isinstance(dataset, DataLoader):
        own = dataset.batch_size
        if own is not None and batch_size not in (own, DEFAULT_BATCH_SIZE):
            raise ConfigError(
                f"the DataLoader has batch size {own}, but the batch size is set to {batch_size}: make them equal"
            )
        if shuffle:
            _refuse_settings(loader, "a DataLoader, which has its own")
        return LoaderBatches(dataset, device, seed=seed)
    if isinstance(dataset, Mapping) or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise ConfigError(
            f"a {type(dataset).__name__} is no dataset: give a TokenDataLoader, a sequence or an iterable of dicts"
        )
    return DatasetBatches(dataset, batch_size, device, collate=collate, seed=seed, shuffle=shuffle, loader=loader)


def _refuse_settings(loader: LoaderConfig, kind: str) -> None:
    names = {row.settings[0].removeprefix("loader."): row.arguments[0] for row in TABLE}
    for field in fields(LoaderConfig):
        if (value := getattr(loader, field.name)) != field.default:
            raise ConfigError(f"loader.{field.name} = {value} has no effect on {kind}: leave {names[field.name]} out")


def held_out(batches: TokenBatches, tokens: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The first `tokens` (None: all) of a stream as batches, each sequence once whatever the batch size."""
    loader = batches.loader
    left = min(tokens or loader.total_tokens, loader.total_tokens - 1) // loader.T
    loader.reset()
    while left > 0:
        x, y = batches.next_batch()
        y[left:] = IGNORE_INDEX
        left -= loader.B
        yield x, y


def collate(examples: list[Any]) -> Any:
    """Stack examples: mappings by key (`label` becomes `labels`), pairs by place; numbers and lists become tensors."""
    first = examples[0]
    if isinstance(first, Mapping):
        named = {key: _stack([example[key] for example in examples], key) for key in first}
        return {("labels" if key in ("label", "label_ids") else key): value for key, value in named.items()}
    if isinstance(first, Sequence) and not isinstance(first, str):
        if odd := [example for example in examples if len(example) != 2]:
            raise DataError(f"an example has {len(odd[0])} parts: give dicts, pairs (x, y), or a data_collator")
        return tuple(_stack(list(column), name) for name, column in zip("xy", zip(*examples, strict=True), strict=True))
    raise DataError(f"an example is a {type(first).__name__}: give dicts or pairs of tensors, or a data_collator")


def _digest(value: Any) -> str | None:
    """A hash of an example; None if it contains anything but numbers, strings, and lists and dicts of them."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().numpy() if value.dtype != torch.bfloat16 else value.float().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return hashlib.sha256(repr((str(value.dtype), np.shape(value))).encode() + value.tobytes()).hexdigest()
    if isinstance(value, Mapping):
        value = [part for key in value for part in (str(key), value[key])]
    if isinstance(value, list | tuple):
        if all(isinstance(part, int | float) for part in value):
            return hashlib.sha256(repr(value).encode()).hexdigest()
        parts = [_digest(part) for part in value]
        return None if None in parts else hashlib.sha256("".join(map(str, parts)).encode()).hexdigest()
    if isinstance(value, str | int | float | bytes | None):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    return None


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on the device, copied while the host goes on."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(to_device(value, device) for value in batch)
    return batch


def token_count(batch: Any) -> int:
    """Tokens that went in; for inputs that are no tokens, examples."""
    inputs = batch.get("input_ids", batch.get("idx")) if isinstance(batch, Mapping) else batch[0]
    if isinstance(inputs, Tensor) and not inputs.is_floating_point():
        return inputs.numel()
    tensors = batch.values() if isinstance(batch, Mapping) else batch
    return next((len(value) for value in tensors if isinstance(value, Tensor) and value.ndim), 0)


def _as_it_is(batch: Any) -> Any:
    return batch


def _stack(values: list[Any], name: str) -> Tensor:
    try:
        return torch.stack([torch.as_tensor(value) for value in values])
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"'{name}' cannot be stacked ({' '.join(str(error).split())[:120]}): give tensors of one shape, or a "
            "data_collator that pads"
        ) from error
