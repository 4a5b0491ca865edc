"""How layers are split over pipeline stages."""

from __future__ import annotations

import itertools

import pytest

from whimbrel.base.errors import ConfigError
from whimbrel.distributed.pipeline import split_layers, stage_indices


def highest_cost(ranges: list[range], costs: list[float], first: float, last: float) -> float:
    sums = [sum(costs[i] for i in layers) for layers in ranges]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("first", "last"), [(0.0, 0.0), (0.5, 3.0)])
def test_the_most_expensive_stage_is_as_cheap_as_possible(stages: int, first: float, last: float) -> None:
    costs = [1.0, 2.0, 1.0, 4.0, 1.0, 1.0, 2.0]
    ranges = split_layers(costs, stages, first, last)
    assert [layer for layers in ranges for layer in layers] == list(range(7))
    every_split = (
        [range(a, b) for a, b in itertools.pairwise((0, *cuts, 7))]
        for cuts in itertools.combinations(range(1, 7), stages - 1)
    )
    best = min(highest_cost(split, costs, first, last) for split in every_split)
    assert highest_cost(ranges, costs, first, last) == best


def test_more_stages_than_layers_are_rejected() -> None:
    with pytest.raises(ConfigError, match="at most 2 pipeline stages"):
        split_layers([1.0, 1.0], 3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_every_stage_belongs_to_one_rank(schedule: str) -> None:
    stages = [index for rank in range(4) for index in stage_indices(schedule, rank, 4)]  # type: ignore[arg-type]
    assert sorted(stages) == list(range(len(stages)))
