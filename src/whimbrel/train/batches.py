"""Micro-batches for training: from token shards, datasets or DataLoaders, with a position that can be saved."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.data import TokenDataLoader, read_manifest
from whimbrel.data.loader import derive_seed
from whimbrel.distributed import World
from whimbrel.models import IGNORE_INDEX
from whimbrel.train.arguments import argument_name
from whimbrel.train.config import LoaderConfig
from whimbrel.train.objectives import DummyBatch
from whimbrel.train.random_state import seed_host, seeded

__all__ = [
    "Batches",
    "Collate",
    "DataLoaderBatches",
    "DatasetBatches",
    "TokenBatches",
    "check_same_data",
    "check_samples_per_step",
    "collate",
    "drop_unused_columns",
    "eval_token_batches",
    "make_batches",
    "to_device",
    "token_count",
]

logger = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]
END = object()
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
SAMPLED_TOKENS = 65536
"""Number of tokens at each end of a stream that are hashed to identify it."""
DEFAULT_BATCH_SIZE = 8
"""Default batch size of the training arguments; a DataLoader's own size takes precedence over it."""


class Batches(Protocol):
    """A source of micro-batches with a position that can be saved and restored."""

    def start_epoch(self, epoch: int) -> None:
        """Start an epoch, or continue it if a resume restored a position inside it."""

    def next_batch(self) -> Any | None:
        """The next micro-batch, on the device; None at the end of the epoch."""

    def exhausted(self) -> bool:
        """Whether the epoch has ended."""

    def steps_for(self, epochs: float, accumulation: int) -> int:
        """Number of optimizer steps in `epochs` epochs."""

    @property
    def epoch(self) -> float:
        """Completed epochs, including the fraction of the current one."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position."""


class TokenBatches:
    """Batches of token shards, read as a cyclic stream: a step may cross an epoch boundary, which ends its epoch."""

    def __init__(self, loader: TokenDataLoader, device: torch.device) -> None:
        self.loader, self.device = loader, device
        self._epoch = 0

    def start_epoch(self, epoch: int) -> None:
        """Start an epoch; it ends when the stream wraps around."""
        self._epoch = max(epoch, self.loader.epoch)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (B, T)."""
        x, y = self.loader.next_batch()
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def exhausted(self) -> bool:
        """Whether the stream has wrapped around since `start_epoch`."""
        return self.loader.epoch > self._epoch

    def steps_for(self, epochs: float, accumulation: int) -> int:
        """Number of optimizer steps that cover `epochs` epochs, rounded up."""
        loader = self.loader
        tokens = accumulation * loader.B * loader.T * loader.world_size
        return max(1, math.ceil(epochs * loader.total_tokens / tokens))

    @property
    def epoch(self) -> float:
        """Tokens read divided by the tokens in the data."""
        return self.loader.position / self.loader.total_tokens

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, and hashes that identify its tokens."""
        return self.loader.state_dict() | self._identity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position; raises DataError if the shards differ from those it was saved with."""
        for name in ("tokenizer", "tokens"):
            saved, current = state.get(name), self._identity[name]
            if saved is not None and current is not None and saved != current:
                raise DataError(
                    f"expected shards with the {name} of the checkpoint ({saved[:12]}), got {current[:12]} in "
                    f"{self.loader.root}: resume with the same data, or choose another output_dir"
                )
        self.loader.load_state_dict(state)

    @cached_property
    def _identity(self) -> dict[str, str | None]:
        """Hashes of the tokenizer, if a manifest names it, and of the tokens at both ends of the stream."""
        stream, manifest = self.loader.stream, read_manifest(self.loader.root)
        count, digest = min(SAMPLED_TOKENS, len(stream)), hashlib.sha256()
        for start in (0, len(stream) - count):
            tokens = np.empty(count, stream.dtype)
            stream.copy(start, tokens)
            digest.update(tokens.astype(np.uint32).tobytes())
        tokenizer = None if manifest is None else manifest.tokenizer.fingerprint
        return {"tokenizer": tokenizer, "tokens": digest.hexdigest()}


class DatasetBatches:
    """Batches of a map-style dataset (reshuffled every epoch) or an iterable dataset (in its own order).

    A global batch is the next `world_size * batch_size` examples, and rank r gets the r-th slice; a short one, at
    the end of an epoch, is split evenly. An iterable dataset is read by every rank, which keeps its slices. Epochs and
    positions are global, so that a run can continue with a different batch size or number of ranks.

    While a batch is built, the global generators are seeded from the seed, the epoch and the batch number. So a batch
    is the same whether it is prefetched, loaded by a worker or loaded after a resume, and the random numbers of the
    training itself do not depend on data loading.
    """

    def __init__(
        self, dataset: Any, batch_size: int, device: torch.device, *,
        collate: Collate, seed: int = 0, shuffle: bool = True, loader: LoaderConfig,
        rank: int = 0, world_size: int = 1,
    ) -> None:  # fmt: skip
        self.dataset, self.batch_size, self.device = dataset, batch_size, device
        self.rank, self.world_size = rank, world_size
        self._collate, self._seed, self._shuffle, self._loader = collate, seed, shuffle, loader
        self._global_batch = batch_size * world_size
        self._epoch, self._batches_used, self._iter_epoch = 0, 0, 0
        self._first_batch = 0
        """Examples in the first batch of the epoch, if a resume with a different batch size left an incomplete one."""
        self._batches: Iterator[Any] | None = None
        self._prefetched: list[Any] = []
        self._stream_digests: deque[str] = deque(maxlen=1)
        """A hash of the first global batch that was read from an iterable dataset."""
        self._dataset_position: dict[str, Any] | None = None
        if isinstance(dataset, Iterator) and not isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"expected a dataset that can be iterated in every epoch, got {type(dataset).__name__}: pass a list or "
                "an object whose __iter__ returns a new iterator"
            )
        if not self.is_map_style and loader.workers > 1 and not hasattr(dataset, "num_shards"):
            raise ConfigError(
                f"expected an iterable dataset with num_shards for {loader.workers} workers, got "
                f"{type(dataset).__name__}: set dataloader_num_workers (loader.workers) to 0 or 1"
            )
        if self.has_length and len(self) == 0:
            if not len(dataset):
                raise DataError(f"expected a dataset with at least one example, got an empty {type(dataset).__name__}")
            raise DataError(
                f"expected a dataset with at least {self._global_batch} examples, got {len(dataset)}: set "
                "dataloader_drop_last=False"
            )

    @property
    def is_map_style(self) -> bool:
        """Whether examples are read by index."""
        return not isinstance(self.dataset, IterableDataset) and all(
            hasattr(self.dataset, name) for name in ("__getitem__", "__len__")
        )

    @property
    def has_length(self) -> bool:
        """Whether the number of batches per epoch is known."""
        return hasattr(self.dataset, "__len__")

    def __len__(self) -> int:
        if not self.has_length:
            raise TypeError(f"object of type {type(self.dataset).__name__} has no len()")
        count, rest = divmod(len(self.dataset) - self._first_batch, self._global_batch)
        return (self._first_batch > 0) + count + (rest > 0 and not self._loader.drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch from its start."""
        self.reset()
        self.start_epoch(self._iter_epoch)
        while (batch := self.next_batch()) is not None:
            yield batch

    def first_example(self) -> Any | None:
        """The first example of a map-style dataset; None for an iterable, which cannot be peeked."""
        if not self.is_map_style:
            return None
        with seeded(derive_seed(self._seed, "first")):
            return self.dataset[0]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to iterate over, as for a DistributedSampler."""
        self._iter_epoch = epoch

    def reset(self) -> None:
        """Reset to the start of the first epoch."""
        self._reset(0)

    def start_epoch(self, epoch: int) -> None:
        """Start an epoch, unless the position is already inside it."""
        if epoch != self._epoch:
            self._reset(epoch)

    def _reset(self, epoch: int) -> None:
        self._epoch, self._batches_used, self._first_batch = epoch, 0, 0
        self._batches, self._dataset_position = None, None
        self._prefetched.clear()

    def next_batch(self) -> Any | None:
        """The next micro-batch, or None at the end of the epoch."""
        if self.exhausted():
            return None
        self._batches_used += 1
        return to_device(self._prefetched.pop(), self.device)

    def exhausted(self) -> bool:
        """Whether the epoch has ended; prefetches the next batch to find out."""
        if not self._prefetched:
            batches = self._open() if self._batches is None else self._batches
            self._dataset_position = self._dataset_state()
            self._prefetched = list(itertools.islice(batches, 1))
        return not self._prefetched

    def samples_per_step(self, accumulation: int) -> int:
        """Examples in an optimizer step of all ranks."""
        return self.batch_size * self.world_size * accumulation

    def steps_for(self, epochs: float, accumulation: int) -> int:
        """Number of optimizer steps in `epochs` epochs; the last step of an epoch may have fewer micro-batches."""
        if not self.has_length:
            raise ConfigError("expected max_steps (train.steps): the length of an iterable dataset is unknown")
        return max(1, math.ceil(epochs * math.ceil(len(self) / accumulation)))

    @property
    def epoch(self) -> float:
        """Completed epochs, including the fraction of the current one if the length is known."""
        return self._epoch + (self._batches_used / len(self) if self.has_length else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of examples used in it, and the dataset's own state if it has one."""
        position = self._batches_used * self._global_batch
        if self._first_batch:
            position += self._first_batch - self._global_batch
        state: dict[str, Any] = {"epoch": self._epoch, "position": position * self._unit, **self._identity()}
        if self._fingerprint is not None:
            state["fingerprint"] = self._fingerprint
        dataset_state = self._dataset_position if self._prefetched else self._dataset_state()
        return state if dataset_state is None else state | {"dataset": dataset_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position; a different batch size or number of ranks continues at the same example."""
        remedy = "resume with the same data and seed, or with resume_skip=('dataset',) (--resume.skip=dataset)"
        for name, value in self._identity().items():
            if state.get(name, value) != value:
                raise DataError(
                    f"expected a dataset with {name} = {state[name]} as in the checkpoint, got {value}: {remedy}"
                )
        saved, current = state.get("fingerprint"), self._fingerprint
        if saved is not None and current is not None and saved != current:
            raise DataError(f"the examples of this dataset differ from the checkpoint's: {remedy}")
        # Older checkpoints have a number of batches instead of a position.
        examples = state["position"] if "position" in state else state["taken"] * state["batch_size"]
        position, rest = divmod(int(examples), self._unit)
        if rest:
            raise DataError(
                f"expected a batch size that divides {examples}, the examples used in this epoch, got "
                f"{self.batch_size}: resume with the same DataLoader"
            )
        self._reset(int(state["epoch"]))
        self._batches_used = math.ceil(position / self._global_batch)
        self._first_batch = position % self._global_batch
        if self._has_exact_state and "dataset" in state:
            self._dataset_position = state["dataset"]

    @property
    def _unit(self) -> int:
        """Examples that are read together: one, or the batch of a DataLoader."""
        return 1

    def _identity(self) -> dict[str, int]:
        """Values that determine the order of an epoch; a saved position is valid only if they match."""
        if self.is_map_style:
            return {"examples": len(self.dataset), "seed": self._seed}
        if self._loader.workers > 1:  # each worker batches its own shards
            return {"seed": self._seed, "workers": self._loader.workers, "global batch size": self._global_batch}
        return {"seed": self._seed}

    @cached_property
    def _fingerprint(self) -> str | None:
        """The dataset's own `fingerprint`, or a hash of a few evenly spaced examples.

        None if they cannot be read in advance or differ on every read.
        """
        if not self.is_map_style:
            return None
        if isinstance(own := getattr(self.dataset, "fingerprint", None), str):
            return own
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
        """Whether the dataset's state can be saved; with workers it is in another process."""
        stateful = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
        return not self.is_map_style and stateful and self._loader.workers == 0 and has_exact_state(self.dataset)

    def _dataset_state(self) -> dict[str, Any] | None:
        if self._batches is None:
            return self._dataset_position
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
        if self.is_map_style:
            batches = MapStyleEpoch(self.dataset, self._order(), self._collate, seed, self.rank, self.world_size)
            self._batches = iter(DataLoader(batches, sampler=range(self._batches_used, len(self)), **shared))
            return self._batches
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._epoch)
        first = 0
        if self._dataset_position is not None:
            self.dataset.load_state_dict(self._dataset_position)
            first = self._batches_used
        stream = IterableEpoch(
            self.dataset, self._global_batch, self._loader.drop_last, self._collate, seed, first,
            self._first_batch, self.rank, self.world_size,
        )  # fmt: skip
        examples = _record_digests(iter(DataLoader(stream, **shared)), self._stream_digests)
        self._batches = itertools.islice(examples, self._batches_used - first, None)
        return self._batches

    def order_identity(self) -> dict[str, Any]:
        """Values that are equal on all ranks if these have the same data in the same order."""
        if not (self.is_map_style or self._prefetched):
            self.exhausted()  # reads the first batch of an iterable dataset
        return {**self._identity(), "examples read": self._fingerprint or next(iter(self._stream_digests), None)}

    def _order(self) -> list[list[int]]:
        """The indices of each global batch in this epoch."""
        count = len(self.dataset)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "epoch", str(self._epoch)))
        order = torch.randperm(count, generator=generator).tolist() if self._shuffle else list(range(count))
        size = self._global_batch
        first = self._first_batch - size if self._first_batch else 0
        return [order[max(start, 0) : start + size] for start in range(first, count, size)][: len(self)]


class DataLoaderBatches(DatasetBatches):
    """A user's DataLoader, or any iterable that yields the batches of one epoch each time it is iterated.

    Several ranks take the loader's batches in turn: every rank reads all of them. At the end of an epoch some ranks may
    have none left.

    The loader decides the order. Without its own generator, it is seeded per epoch and batch, so that a resumed run
    repeats the order; otherwise the state of its generator is part of the saved position. A resume reads and skips the
    batches that were already used.
    """

    def __init__(self, batches: Any, device: torch.device, *, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if isinstance(batches, Iterator) or not hasattr(batches, "__iter__"):
            raise ConfigError(
                f"expected a DataLoader, or an iterable that can be iterated once per epoch, got "
                f"{type(batches).__name__}: return a torch.utils.data.DataLoader"
            )
        sampler = getattr(batches, "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ConfigError(
                f"expected a DataLoader over the whole dataset, got one with a DistributedSampler for "
                f"{sampler.num_replicas} ranks: remove the sampler; the trainer splits the data"
            )
        self._epoch_start_states: list[Tensor] = []
        batch_size = getattr(batches, "batch_size", None) or 1
        super().__init__(
            batches, batch_size, device, collate=_no_collate, seed=seed, shuffle=False, loader=LoaderConfig(),
            rank=rank, world_size=world_size,
        )  # fmt: skip
        self._global_batch = world_size  # in batches of the loader

    @property
    def is_map_style(self) -> bool:
        """Always false: batches are read in the loader's order."""
        return False

    @property
    def has_length(self) -> bool:
        """Whether the number of batches is known."""
        try:
            len(self.dataset)
        except TypeError:
            return False
        return True

    def state_dict(self) -> dict[str, Any]:
        """The position, and the state of the loader's own generators at the start of the epoch."""
        states = self._epoch_start_states if self._batches is not None else self._generator_states()
        return super().state_dict() | ({"generators": states} if states else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position."""
        super().load_state_dict(state)
        generators, saved = self._generators(), state.get("generators", ())
        if len(generators) != len(saved):
            raise DataError(
                f"expected a DataLoader with {len(saved)} generators of its own, as in the checkpoint, got "
                f"{len(generators)}: pass the same DataLoader, or resume with resume_skip=('dataset',) "
                "(--resume.skip=dataset)"
            )
        for generator, generator_state in zip(generators, saved, strict=True):
            generator.set_state(torch.as_tensor(generator_state, dtype=torch.uint8))

    @property
    def _unit(self) -> int:
        return self.batch_size

    def _identity(self) -> dict[str, int]:
        return {"batches": len(self.dataset), "seed": self._seed} if self.has_length else {"seed": self._seed}

    def order_identity(self) -> dict[str, Any]:
        """The length, and the loader's own generators."""
        return {**self._identity(), "generators": [state.tolist() for state in self._generator_states()]}

    _fingerprint = None  # examples cannot be read ahead

    @property
    def _has_exact_state(self) -> bool:
        return False

    def _open(self) -> Iterator[Any]:
        """Start iterating at the current position."""
        self._epoch_start_states = self._generator_states()
        for candidate in (self.dataset, *(getattr(self.dataset, name, None) for name in ("dataset", "sampler"))):
            if hasattr(candidate, "set_epoch"):
                candidate.set_epoch(self._epoch)
        self._batches = itertools.islice(self._own_batches(), self._batches_used, None)
        return self._batches

    def _own_batches(self) -> Iterator[Any]:
        """This rank's batch of every `world_size` batches."""
        batches, size = self._seeded_epoch(), self._first_batch or self.world_size
        while group := list(itertools.islice(batches, size)):
            yield group[self.rank] if self.rank < len(group) else DummyBatch(group[-1])
            size = self.world_size

    def _seeded_epoch(self) -> Iterator[Any]:
        seed = derive_seed(self._seed, "batches", self._epoch)
        with seeded(seed):
            batches = iter(self.dataset)
        for number in itertools.count():
            with seeded(derive_seed(seed, number)):
                batch = next(batches, END)
            if batch is END:
                return
            yield batch

    def _generator_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _generators(self) -> list[torch.Generator]:
        """The generators of a DataLoader and its samplers, without duplicates."""
        sampler = getattr(self.dataset, "sampler", None)
        candidates = (self.dataset, sampler, getattr(self.dataset, "batch_sampler", None))
        generators = (getattr(candidate, "generator", None) for candidate in candidates)
        return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())


def _share(batch: list[Any], rank: int, world_size: int) -> list[Any]:
    """A rank's slice of a global batch; slices differ by at most one example."""
    return batch[len(batch) * rank // world_size : len(batch) * (rank + 1) // world_size]


class MapStyleEpoch(Dataset[Any]):
    """The batches of one epoch over a map-style dataset: of each global batch in `order`, the slice of one rank."""

    def __init__(
        self, dataset: Any, order: list[list[int]], collate: Collate, seed: int, rank: int, world_size: int
    ) -> None:
        self._dataset, self._order, self._collate, self._seed = dataset, order, collate, seed
        self._rank, self._world_size = rank, world_size

    def __getitem__(self, number: int) -> Any:
        share = _share(self._order[number], self._rank, self._world_size)
        indices, fetch = share or self._order[number][:1], getattr(self._dataset, "__getitems__", None)
        # One process with `world_size` times the accumulation would use the same seeds.
        with seeded(derive_seed(self._seed, number * self._world_size + self._rank)):
            batch = self._collate(fetch(indices) if fetch else [self._dataset[index] for index in indices])
        return batch if share else DummyBatch(batch)


class IterableEpoch(IterableDataset[Any]):
    """The batches of one epoch over an iterable dataset, or of a worker's shard of it, numbered from `first`.

    `batch_size` is the size of a global batch, of which it yields the slice of one rank; the batch with number 0 has
    `first_batch` examples, if that is not 0.
    """

    def __init__(
        self, dataset: Any, batch_size: int, drop_last: bool, collate: Collate, seed: int, first: int,
        first_batch: int, rank: int, world_size: int,
    ) -> None:  # fmt: skip
        self._dataset, self._batch_size, self._drop_last = dataset, batch_size, drop_last
        self._collate, self._seed, self._first, self._first_batch = collate, seed, first, first_batch
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        seed = derive_seed(self._seed, "worker", 0 if worker is None else worker.id)
        with seeded(seed):
            examples = iter(self._dataset)
        for number in itertools.count(self._first):
            size = self._batch_size if number or not self._first_batch else self._first_batch
            with seeded(derive_seed(seed, number)):
                global_batch = list(itertools.islice(examples, size))
                if len(global_batch) < (size if self._drop_last else 1):
                    return
                if self._rank:  # until here, all ranks draw the same random numbers
                    seed_host(derive_seed(seed, number, self._rank))
                share = _share(global_batch, self._rank, self._world_size)
                batch = self._collate(share or global_batch[:1])
            digest = _digest(global_batch) if self._world_size > 1 and number == self._first else None
            yield batch if share else DummyBatch(batch), digest


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
        if malformed := [example for example in examples if len(example) != 2]:
            raise DataError(
                f"expected examples as dicts or pairs (x, y), got {len(malformed[0])} values: pass a data_collator"
            )
        return tuple(_stack(list(column), name) for name, column in zip("xy", zip(*examples, strict=True), strict=True))
    raise DataError(f"expected examples as dicts or pairs of tensors, got {type(first).__name__}: pass a data_collator")


def _record_digests(batches: Iterator[tuple[Any, str | None]], digests: deque[str]) -> Iterator[Any]:
    """The batches alone; digests are appended to `digests`.

    Not a method: a reference cycle of batches and generator would be garbage-collected, and then the workers of a
    DataLoader are not told to stop, and torch waits five seconds for each.
    """
    for batch, digest in batches:
        if digest is not None:
            digests.append(digest)
        yield batch


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
    if isinstance(batch, DummyBatch):
        return DummyBatch(to_device(batch.batch, device))
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
    accepted = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if not isinstance(names, list) or not hasattr(dataset, "remove_columns") or not accepted:
        return dataset
    unused = [name for name in names if name not in accepted and name not in (*LABEL_COLUMNS, *labels)]
    if unused and len(unused) == len(names):
        raise DataError(
            f"none of the columns ({', '.join(names)}) is an argument of {type(model).__name__} "
            f"({', '.join(sorted(accepted))}): tokenize the text first"
        )
    if unused:
        logger.info("dropping columns that %s does not accept: %s", type(model).__name__, unused)
    return dataset.remove_columns(unused) if unused else dataset


def _no_collate(batch: Any) -> Any:
    return batch


def _stack(values: list[Any], name: str) -> Tensor:
    try:
        return torch.stack([torch.as_tensor(value) for value in values])
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"expected tensors of equal shape for '{name}' ({' '.join(str(error).split())[:120]}): pass a "
            "data_collator that pads"
        ) from error


def make_batches(
    dataset: Any, batch_size: int | None, device: torch.device, *,
    collate: Collate, seed: int, shuffle: bool, loader: LoaderConfig, rank: int = 0, world_size: int = 1,
) -> TokenBatches | DatasetBatches:  # fmt: skip
    """Batches of a dataset, DataLoader or TokenDataLoader; `batch_size` may be None only for a TokenDataLoader.

    `rank` and `world_size` count the ranks that read different data.
    """
    if isinstance(dataset, TokenDataLoader):
        if batch_size not in (None, dataset.B):
            raise ConfigError(
                f"expected the TokenDataLoader's B = {dataset.B} as batch size, got {batch_size}: make them equal"
            )
        _reject_loader_settings(loader, "a TokenDataLoader")
        dataset.split(rank, world_size)
        return TokenBatches(dataset, device)
    assert batch_size is not None
    if isinstance(dataset, DataLoader):
        loader_batch_size = dataset.batch_size
        if loader_batch_size is not None and batch_size not in (loader_batch_size, DEFAULT_BATCH_SIZE):
            raise ConfigError(
                f"expected the DataLoader's batch size {loader_batch_size}, got {batch_size}: make them equal"
            )
        if shuffle:
            _reject_loader_settings(loader, "a DataLoader")
        return DataLoaderBatches(dataset, device, seed=seed, rank=rank, world_size=world_size)
    if isinstance(dataset, Mapping) or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise ConfigError(
            f"expected a dataset, got {type(dataset).__name__}: pass a TokenDataLoader, sequence or iterable"
        )
    if world_size > 1 and getattr(dataset, "_distributed", None) is not None:  # a streaming dataset of `datasets`
        raise ConfigError(
            "expected the whole dataset, got the part of one rank (split_dataset_by_node): pass it unsplit; the "
            "trainer splits the data"
        )
    return DatasetBatches(
        dataset, batch_size, device, collate=collate, seed=seed, shuffle=shuffle, loader=loader,
        rank=rank, world_size=world_size,
    )  # fmt: skip


def check_samples_per_step(saved: int | None, batches: Any, accumulation: int) -> None:
    """Raise ConfigError unless a step has `saved` samples: an epoch would have a different number of steps."""
    if saved is None or not isinstance(batches, DatasetBatches):
        return
    if (samples := batches.samples_per_step(accumulation)) != saved:
        raise ConfigError(
            f"expected {saved} samples per step, as in the checkpoint, got {batches.batch_size} x "
            f"{batches.world_size} ranks x {accumulation} = {samples}: change per_device_train_batch_size or "
            "gradient_accumulation_steps, or set max_steps"
        )


def check_same_data(batches: Any, world: World) -> None:
    """Raise DataError if ranks have different datasets, or the same in different orders, as if they were split."""
    if world.size == 1 or not isinstance(batches, DatasetBatches):
        return
    found = world.all_gather_object(batches.order_identity())
    for rank, identity in enumerate(found):
        for name in (name for name in identity if identity[name] != found[0][name]):
            values = "" if name == "generators" else f" ({identity[name]} and {found[0][name]})"
            raise DataError(
                f"expected the same data on all ranks, got different {name} on rank {rank} and rank 0{values}: pass "
                "the whole dataset with the same seed on every rank; the trainer splits it"
            )


def _reject_loader_settings(loader: LoaderConfig, dataset_type: str) -> None:
    """Raise for settings that would be ignored."""
    for field in fields(LoaderConfig):
        if (value := getattr(loader, field.name)) != field.default:
            setting = f"loader.{field.name}"
            raise ConfigError(f"{setting} = {value} has no effect on {dataset_type}: remove {argument_name(setting)}")


def eval_token_batches(batches: TokenBatches, tokens: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The first `tokens` (None: all) of a stream as batches; each sequence occurs once, for any batch size.

    All ranks get the same number of batches.
    """
    loader = batches.loader
    sequences = min(tokens or loader.total_tokens, loader.total_tokens - 1) // loader.T
    loader.reset()
    while sequences > 0:
        x, y = batches.next_batch()
        y[max(0, sequences - loader.rank * loader.B) :] = IGNORE_INDEX  # the last batch may wrap around to the start
        sequences -= loader.B * loader.world_size
        yield x, y


def token_count(batch: Any) -> int:
    """Number of tokens in a batch; if its inputs are not token ids, the number of examples."""
    if isinstance(batch, DummyBatch):
        return 0
    inputs = batch.get("input_ids") if isinstance(batch, Mapping) else batch[0]
    if isinstance(inputs, Tensor) and not inputs.is_floating_point():
        return inputs.numel()
    tensors = batch.values() if isinstance(batch, Mapping) else batch
    return next((len(value) for value in tensors if isinstance(value, Tensor) and value.ndim), 0)
