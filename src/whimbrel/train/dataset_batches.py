"""Batches of datasets and DataLoaders, reproducible and resumable at any batch."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.data.loader import derive_seed
from whimbrel.train.config import LoaderConfig

__all__ = ["Collate", "DatasetBatches", "LoaderBatches", "collate", "drop_unused_columns", "to_device"]

Collate = Callable[[list[Any]], Any]
SAMPLED = 8
"""Number of examples that are hashed to identify a dataset."""
LABELS = ("label", "label_ids", "labels")
EXACT_STREAMS = frozenset(
    f"{kind}Iterable"
    for kind in (
        "ArrowExamples", "Examples", "FilteredExamples", "FormattedExamples", "MappedExamples",
        "RebatchedArrowExamples", "SelectColumns", "SkipExamples", "StepExamples", "TakeExamples",
    )
)  # fmt: skip
"""Stages of a streaming `datasets` pipeline whose state says all; a shuffle buffer, for one, is not in its state."""


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
            batches = MapStyleEpoch(self.dataset, self._order(), self._collate, seed)
            self._batches = iter(DataLoader(batches, sampler=range(self._taken, len(self)), **shared))
            return self._batches
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._epoch)
        first = 0
        if self._cursor is not None:
            self.dataset.load_state_dict(self._cursor)
            first = self._taken
        stream = IterableEpoch(self.dataset, self.batch_size, self._loader.drop_last, self._collate, seed, first)
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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, NumPy's and torch's CPU generator from `seed`; afterwards they are as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


class MapStyleEpoch(Dataset[Any]):
    """The batches of one pass over an indexed dataset."""

    def __init__(self, dataset: Any, order: list[list[int]], collate: Collate, seed: int) -> None:
        self._dataset, self._order, self._collate, self._seed = dataset, order, collate, seed

    def __getitem__(self, number: int) -> Any:
        places, fetch = self._order[number], getattr(self._dataset, "__getitems__", None)
        with seeded(derive_seed(self._seed, number)):
            return self._collate(fetch(places) if fetch else [self._dataset[place] for place in places])


class IterableEpoch(IterableDataset[Any]):
    """The batches of one pass over an iterable dataset, or of a worker's part of it, from the `first` on."""

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, collate: Collate, seed: int, first: int) -> None:
        self._dataset, self._batch_size, self._drop_last = dataset, batch_size, drop_last
        self._collate, self._seed, self._first = collate, seed, first

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        seed = derive_seed(self._seed, "worker", 0 if worker is None else worker.id)
        with seeded(seed):
            examples = iter(self._dataset)
        for number in itertools.count(self._first):
            with seeded(derive_seed(seed, number)):
                chosen = list(itertools.islice(examples, self._batch_size))
                if len(chosen) < (self._batch_size if self._drop_last else 1):
                    return
                batch = self._collate(chosen)
            yield batch


def state_is_exact(dataset: Any) -> bool:
    """Whether a dataset goes back to the very example: not through a buffer, nor a batch that is mapped as one."""
    stage = getattr(dataset, "_ex_iterable", None)
    while stage is not None:
        if type(stage).__name__ not in EXACT_STREAMS or getattr(stage, "batched", False):
            return False
        stage = getattr(stage, "ex_iterable", None)
    return True


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


def drop_unused_columns(dataset: Any, model: nn.Module, labels: Sequence[str] = ()) -> Any:
    """The dataset without the columns that `forward` does not name, before any collator sees them, as people know it.

    `labels` are kept too. A `forward` with only `**kwargs` may use every column, and other kinds of datasets are
    returned unchanged.
    """
    names = getattr(dataset, "column_names", None)
    parameters = inspect.signature(model.forward).parameters.values()
    wanted = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if not isinstance(names, list) or not hasattr(dataset, "remove_columns") or not wanted:
        return dataset
    unused = [name for name in names if name not in wanted and name not in (*LABELS, *labels)]
    if unused and len(unused) == len(names):
        raise DataError(
            f"none of the columns ({', '.join(names)}) is an argument of {type(model).__name__} "
            f"({', '.join(sorted(wanted))}): tokenize the text first"
        )
    if unused:
        logging.getLogger(__name__).info("columns that %s does not take are left out: %s", type(model).__name__, unused)
    return dataset.remove_columns(unused) if unused else dataset


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
