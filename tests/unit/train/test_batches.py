"""Datasets as micro-batches: order, length, and a cursor that goes back to the very batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.train.batches import DatasetBatches, collate, make_batches, token_count
from whimbrel.train.settings import LoaderConfig

CPU = torch.device("cpu")


class Counting(IterableDataset[dict[str, int]]):
    """The numbers up to `size`, in order, as an iterable without state."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter({"x": i} for i in range(self.size))


def listed(size: int) -> list[dict[str, int]]:
    return [{"x": i} for i in range(size)]


def make(dataset: Any, batch_size: int = 4, *, shuffle: bool = True, **loader: Any) -> DatasetBatches:
    return DatasetBatches(
        dataset, batch_size, CPU, collate=collate, seed=7, shuffle=shuffle, loader=LoaderConfig(**loader)
    )


def take(batches: DatasetBatches, count: int, epoch: int = 0) -> list[tuple[int, list[int]]]:
    """(epoch, values) of the next batches, over as many passes as it takes."""
    found = []
    batches.begin(epoch)
    while len(found) < count:
        batch = batches.next_batch()
        if batch is None:
            epoch += 1
            batches.begin(epoch)
        else:
            found.append((epoch, batch["x"].tolist()))
    return found


def flat(found: list[tuple[int, list[int]]], epoch: int) -> list[int]:
    return [value for number, values in found if number == epoch for value in values]


SOURCES = {
    "list": lambda: listed(10),
    "iterable": lambda: Counting(10),
    "datasets": lambda: datasets.Dataset.from_list(listed(10)),
    "stateful": lambda: datasets.Dataset.from_list(listed(10)).to_iterable_dataset(),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_cursor_goes_back_to_the_very_batch(name: str, workers: int) -> None:
    if workers and name in ("datasets", "stateful"):
        pytest.skip("the library's own workers are slow to start; the iterable stands for them")
    whole = take(make(SOURCES[name](), workers=workers), 8)
    assert sorted(flat(whole, 0)) == list(range(10))
    for stop in range(8):
        first = make(SOURCES[name](), workers=workers)
        begun = take(first, stop)
        state = first.state_dict()
        second = make(SOURCES[name](), workers=workers)
        second.load_state_dict(state)
        assert begun + take(second, 8 - stop, epoch=state["epoch"]) == whole


def test_looking_ahead_does_not_move_the_cursor() -> None:
    batches = make(SOURCES["stateful"]())
    take(batches, 1)
    before = batches.state_dict()
    assert not batches.exhausted()
    assert batches.state_dict() == before


def test_each_pass_has_its_own_order_and_every_example_once() -> None:
    found = take(make(listed(10)), 6)
    passes = [flat(found, number) for number in (0, 1)]
    assert [sorted(values) for values in passes] == [list(range(10))] * 2
    assert passes[0] != passes[1]
    assert [len(values) for _, values in found] == [4, 4, 2] * 2
    assert [values for _, values in take(make(listed(10), shuffle=False), 3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(values) for _, values in take(make(listed(10), drop_last=True), 4)] == [4] * 4


def test_epochs_in_steps() -> None:
    batches = make(listed(10))
    assert [batches.steps_for(epochs, 2) for epochs in (0.1, 1, 1.5, 2)] == [1, 2, 3, 4]
    take(batches, 2)
    assert batches.epoch == pytest.approx(2 / 3)
    with pytest.raises(ConfigError, match="iterable dataset is not known: give max_steps"):
        make(Counting(3)).steps_for(1, 1)


def test_another_batch_size_is_taken_up_where_it_fits() -> None:
    batches = make(listed(12), 4, shuffle=False)
    take(batches, 2)
    halved = make(listed(12), 2, shuffle=False)
    halved.load_state_dict(batches.state_dict())
    assert take(halved, 1) == [(0, [8, 9])]
    with pytest.raises(DataError, match="8 examples into its pass, which is no multiple of the batch size 3"):
        make(listed(12), 3).load_state_dict(batches.state_dict())


def test_what_cannot_be_batched_is_refused() -> None:
    with pytest.raises(DataError, match="less than one batch of 4"):
        make(listed(3), drop_last=True)
    with pytest.raises(ConfigError, match="int is no dataset"):
        make_batches(3, 1, CPU, collate=collate, seed=0, shuffle=False, loader=LoaderConfig())
    with pytest.raises(ConfigError, match="gives each of 2 workers every example"):
        make(Counting(3), workers=2)
    with pytest.raises(DataError, match=r"'x' cannot be stacked .* data_collator that pads"):
        collate([{"x": [1, 2]}, {"x": [1]}])
    with pytest.raises(DataError, match="an example is a str"):
        collate(["a"])


def test_collate() -> None:
    batch = collate([{"x": torch.ones(2), "label": 1}, {"x": torch.zeros(2), "label": 0}])
    assert batch["x"].shape == (2, 2)
    assert batch["labels"].tolist() == [1, 0]
    x, y = collate([(torch.ones(2), 1), (torch.zeros(2), 0)])
    assert isinstance(x, Tensor)
    assert y.tolist() == [1, 0]
    assert token_count({"input_ids": torch.zeros(2, 5, dtype=torch.int64)}) == 10
    assert token_count({"x": torch.zeros(2, 5)}) == 2
