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
SAMPLED_EXAMPLES = 8
"""Number of examples that are hashed to identify a dataset."""
LABEL_COLUMNS = ("label", "label_ids", "labels")
RESUMABLE_STAGES = frozenset(
    f"{kind}Iterable"
    for kind in (
        "ArrowExamples", "Examples", "FilteredExamples", "FormattedExamples", "MappedExamples",
        "RebatchedArrowExamples", "SelectColumns", "SkipExamples", "StepExamples", "TakeExamples",
    )
)  # fmt: skip
"""Stages of a streaming `datasets` pipeline whose state is complete; that of a shuffle buffer is not, for example."""


class DatasetBatches:
    """Batches of a map-style dataset (reshuffled every epoch) or an iterable dataset (in its own order).

    While a batch is built, the global generators are seeded from the seed, the epoch and the batch number. So a batch
    is the same whether it is prefetched, loaded by a worker or loaded after a resume, and the random numbers of the
    training itself do not depend on data loading.
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
                f"expected a dataset that can be iterated in every epoch, got {type(dataset).__name__}: pass a list or "
                "an object whose __iter__ returns a new iterator"
            )
        if not self.indexed and loader.workers > 1 and not hasattr(dataset, "num_shards"):
            raise ConfigError(
                f"expected an iterable dataset with num_shards for {loader.workers} workers, got "
                f"{type(dataset).__name__}: set dataloader_num_workers (loader.workers) to 0 or 1"
            )
        if self.sized and len(self) == 0:
            remedy = ": set dataloader_drop_last=False" if len(dataset) else ""
            raise DataError(f"expected at least one batch of {batch_size} examples, got {len(dataset)}{remedy}")

    @property
    def sized(self) -> bool:
        """Whether the number of batches per epoch is known."""
        return hasattr(self.dataset, "__len__")

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError(f"object of type {type(self.dataset).__name__} has no len()")
        count, rest = divmod(len(self.dataset), self.batch_size)
        return count + (rest > 0 and not self._loader.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch from its start."""
        self.rewind()
        self.begin(self._iterated)
        while (batch := self.next_batch()) is not None:
            yield batch

    def first_example(self) -> Any | None:
        """The first example of a map-style dataset; None for an iterable, which cannot be peeked."""
        if not self.indexed:
            return None
        with seeded(derive_seed(self._seed, "first")):
            return self.dataset[0]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to iterate over, as for a DistributedSampler."""
        self._iterated = epoch

    def rewind(self) -> None:
        """Go to the start of the first epoch."""
        self._epoch, self._taken, self._batches, self._cursor = 0, 0, None, None
        self._ahead.clear()

    def begin(self, epoch: int) -> None:
        """Start an epoch, unless the position is already inside it."""
        if epoch != self._epoch:
            self._epoch, self._taken, self._batches, self._cursor = epoch, 0, None, None
            self._ahead.clear()

    def next_batch(self) -> Any | None:
        """The next micro-batch, or None at the end of the epoch."""
        if self.exhausted():
            return None
        self._taken += 1
        return to_device(self._ahead.pop(), self.device)

    def exhausted(self) -> bool:
        """Whether the epoch has ended; prefetches the next batch to find out."""
        if not self._ahead:
            batches = self._open() if self._batches is None else self._batches
            self._cursor = self._dataset_state()
            self._ahead = list(itertools.islice(batches, 1))
        return not self._ahead

    def steps_for(self, epochs: float, accumulation: int) -> int:
        """Number of optimizer steps in `epochs` epochs; the last step of an epoch may have fewer micro-batches."""
        if not self.sized:
            raise ConfigError("expected max_steps (train.steps): the length of an iterable dataset is unknown")
        return max(1, -int(-epochs * -(-len(self) // accumulation) // 1))

    @property
    def epoch(self) -> float:
        """Completed epochs, including the fraction of the current one if the length is known."""
        return self._epoch + (self._taken / len(self) if self.sized else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of batches used, and the dataset's own state if it has one."""
        state: dict[str, Any] = {"epoch": self._epoch, "taken": self._taken, "batch_size": self.batch_size}
        state |= self._identity()
        if self._fingerprint is not None:
            state["fingerprint"] = self._fingerprint
        own = self._cursor if self._ahead else self._dataset_state()
        return state if own is None else state | {"dataset": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position; a different batch size continues at the same example, or raises DataError."""
        remedy = "resume with the same data and seed, or with resume_skip=('dataset',) (--resume.skip=dataset)"
        for name, value in self._identity().items():
            if state.get(name, value) != value:
                raise DataError(
                    f"expected a dataset with {name} = {state[name]} as in the checkpoint, got {value}: {remedy}"
                )
        theirs, ours = state.get("fingerprint"), self._fingerprint
        if theirs is not None and ours is not None and theirs != ours:
            raise DataError(f"the examples of this dataset differ from those of the checkpoint: {remedy}")
        examples = state["taken"] * state["batch_size"]
        if examples % self.batch_size:
            raise DataError(
                f"expected a batch size that divides {examples}, the examples used in this epoch, got "
                f"{self.batch_size}: resume with {state['batch_size']}"
            )
        self.rewind()
        self._epoch, self._taken = int(state["epoch"]), examples // self.batch_size
        if self._has_exact_state and "dataset" in state:
            self._cursor = state["dataset"]

    def _identity(self) -> dict[str, int]:
        """Values that determine the order of an epoch; a saved position is valid only if they match."""
        return {"examples": len(self.dataset), "seed": self._seed} if self.indexed else {"seed": self._seed}

    @cached_property
    def _fingerprint(self) -> str | None:
        """A hash of a few evenly spaced examples; None if they cannot be read in advance or differ on every read."""
        if not self.indexed:
            return None
        last, digests = len(self.dataset) - 1, []
        indices = sorted({round(last * part / (SAMPLED_EXAMPLES - 1)) for part in range(SAMPLED_EXAMPLES)})
        for _ in range(2):
            with seeded(derive_seed(self._seed, "fingerprint")):
                digests.append([_digest(self.dataset[index]) for index in indices])
        if digests[0] != digests[1] or None in digests[0]:
            return None
        return hashlib.sha256("".join(map(str, digests[0])).encode()).hexdigest()[:16]

    @property
    def _has_exact_state(self) -> bool:
        """Whether the dataset's state can be saved; with workers it is that of another process."""
        stateful = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
        return not self.indexed and stateful and self._loader.workers == 0 and has_exact_state(self.dataset)

    def _dataset_state(self) -> dict[str, Any] | None:
        if self._batches is None:
            return self._cursor
        return self.dataset.state_dict() if self._has_exact_state else None

    def _open(self) -> Iterator[Any]:
        """Start iterating at the current position."""
        workers, seed = self._loader.workers, derive_seed(self._seed, "batches", self._epoch)
        shared: dict[str, Any] = {
            "batch_size": None, "collate_fn": _no_collate, "num_workers": workers,
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
        """The indices of each batch in this epoch."""
        count = len(self.dataset)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "epoch", str(self._epoch)))
        order = torch.randperm(count, generator=generator).tolist() if self._shuffle else list(range(count))
        return [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(len(self))]


class LoaderBatches(DatasetBatches):
    """A user's DataLoader, or any iterable that yields the batches of one epoch each time it is iterated.

    The loader decides the order. Without its own generator, it is seeded per epoch and batch, so that a resumed run
    repeats the order; otherwise the state of its generator is part of the saved position. A resume reads and skips the
    batches that were already used.
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
        """The position, and the state of the loader's own generators at the start of the epoch."""
        states = (
            self._start if self._batches is not None else [generator.get_state() for generator in self._generators()]
        )
        return super().state_dict() | ({"generators": states} if states else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position."""
        super().load_state_dict(state)
        for generator, saved in zip(self._generators(), state.get("generators", ()), strict=True):
            generator.set_state(torch.as_tensor(saved, dtype=torch.uint8))

    def _identity(self) -> dict[str, int]:
        return {"batches": len(self), "seed": self._seed} if self.sized else {"seed": self._seed}

    _fingerprint = None  # examples cannot be read ahead

    @property
    def _has_exact_state(self) -> bool:
        return False

    def _open(self) -> Iterator[Any]:
        """Batches from the current position on."""
        self._start = [generator.get_state() for generator in self._generators()]
        for part in (self.dataset, *(getattr(self.dataset, name, None) for name in ("dataset", "sampler"))):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
        self._batches = itertools.islice(self._seeded_epoch(), self._taken, None)
        return self._batches

    def _seeded_epoch(self) -> Iterator[Any]:
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
    """Seed the generators of Python, NumPy and torch (CPU) inside the block, and restore them afterwards."""
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
    """The batches of one epoch over a map-style dataset."""

    def __init__(self, dataset: Any, order: list[list[int]], collate: Collate, seed: int) -> None:
        self._dataset, self._order, self._collate, self._seed = dataset, order, collate, seed

    def __getitem__(self, number: int) -> Any:
        indices, fetch = self._order[number], getattr(self._dataset, "__getitems__", None)
        with seeded(derive_seed(self._seed, number)):
            return self._collate(fetch(indices) if fetch else [self._dataset[index] for index in indices])


class IterableEpoch(IterableDataset[Any]):
    """The batches of one epoch over an iterable dataset, or of a worker's shard of it, numbered from `first`."""

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


def has_exact_state(dataset: Any) -> bool:
    """Whether the state of a dataset restores the exact example: no shuffle buffer, no batched map."""
    stage = getattr(dataset, "_ex_iterable", None)
    while stage is not None:
        if type(stage).__name__ not in RESUMABLE_STAGES or getattr(stage, "batched", False):
            return False
        stage = getattr(stage, "ex_iterable", None)
    return True


def collate(examples: list[Any]) -> Any:
    """Stack examples: dicts by key (`label` becomes `labels`), pairs by position; numbers and lists become tensors."""
    first = examples[0]
    if isinstance(first, Mapping):
        named = {key: _stack([example[key] for example in examples], key) for key in first}
        return {("labels" if key in ("label", "label_ids") else key): value for key, value in named.items()}
    if isinstance(first, Sequence) and not isinstance(first, str):
        if odd := [example for example in examples if len(example) != 2]:
            raise DataError(
                f"expected examples as dicts or pairs (x, y), got {len(odd[0])} values: pass a data_collator"
            )
        return tuple(_stack(list(column), name) for name, column in zip("xy", zip(*examples, strict=True), strict=True))
    raise DataError(f"expected examples as dicts or pairs of tensors, got {type(first).__name__}: pass a data_collator")


def _digest(value: Any) -> str | None:
    """A hash of an example; None if it is not made of tensors, arrays, numbers, strings, lists and dicts."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            return None
        value = value.detach().cpu().resolve_conj().resolve_neg()
        if value.is_floating_point() and value.dtype not in (torch.float16, torch.float32, torch.float64):
            value = value.float()  # NumPy has no bfloat16 and float8
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.tolist()  # its bytes would be addresses, which differ in every process
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
    """Move the tensors of a batch to the device, asynchronously from pinned memory."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(to_device(value, device) for value in batch)
    return batch


def drop_unused_columns(dataset: Any, model: nn.Module, labels: Sequence[str] = ()) -> Any:
    """Remove the columns of a `datasets.Dataset` that are neither arguments of the model's `forward` nor `labels`.

    Returns the dataset unchanged if `forward` only has `**kwargs`, or if it is another kind of dataset.
    """
    names = getattr(dataset, "column_names", None)
    parameters = inspect.signature(model.forward).parameters.values()
    wanted = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if not isinstance(names, list) or not hasattr(dataset, "remove_columns") or not wanted:
        return dataset
    unused = [name for name in names if name not in wanted and name not in (*LABEL_COLUMNS, *labels)]
    if unused and len(unused) == len(names):
        raise DataError(
            f"none of the columns ({', '.join(names)}) is an argument of {type(model).__name__} "
            f"({', '.join(sorted(wanted))}): tokenize the text first"
        )
    if unused:
        logging.getLogger(__name__).info("dropping columns that %s does not accept: %s", type(model).__name__, unused)
    return dataset.remove_columns(unused) if unused else dataset


def _no_collate(batch: Any) -> Any:
    return batch


def _stack(values: list[Any], name: str) -> Tensor:
    try:
        return torch.stack([torch.as_tensor(value) for value in values])
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"expected tensors of one shape for '{name}' ({' '.join(str(error).split())[:120]}): pass a data_collator "
            "that pads"
        ) from error
