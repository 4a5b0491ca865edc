"""One pass over a dataset as ready batches, each the same whoever fetches it: a worker, ahead, or after a resume."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from whimbrel.base.seeds import derive_seed

__all__ = ["IndexedPass", "StreamedPass", "seeded", "state_is_exact"]

Collate = Callable[[list[Any]], Any]

EXACT_STREAMS = frozenset(
    f"{kind}Iterable"
    for kind in (
        "ArrowExamples", "Examples", "FilteredExamples", "FormattedExamples", "MappedExamples",
        "RebatchedArrowExamples", "SelectColumns", "SkipExamples", "StepExamples", "TakeExamples",
    )
)  # fmt: skip
"""Stages of a streaming `datasets` pipeline whose state says all; a shuffle buffer, for one, is not in its state."""


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


class IndexedPass(Dataset[Any]):
    """The batches of one pass over an indexed dataset."""

    def __init__(self, dataset: Any, order: list[list[int]], collate: Collate, seed: int) -> None:
        self._dataset, self._order, self._collate, self._seed = dataset, order, collate, seed

    def __getitem__(self, number: int) -> Any:
        places, fetch = self._order[number], getattr(self._dataset, "__getitems__", None)
        with seeded(derive_seed(self._seed, number)):
            return self._collate(fetch(places) if fetch else [self._dataset[place] for place in places])


class StreamedPass(IterableDataset[Any]):
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
