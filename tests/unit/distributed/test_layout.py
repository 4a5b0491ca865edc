"""`[parallel]` settings and the layouts they describe."""

from __future__ import annotations

import math
from typing import Any

import pytest

from whimbrel.base.errors import ConfigError
from whimbrel.distributed.layout import Layout, ParallelConfig, resolve_layout


@pytest.mark.parametrize(
    ("settings", "world_size", "per_node", "layout"),
    [
        ({}, 8, 8, Layout(dp_replicate=8)),
        ({"strategy": "ddp"}, 1, 1, Layout()),
        ({"strategy": "fsdp"}, 8, 8, Layout(dp_shard=8)),
        ({"strategy": "hsdp"}, 16, 8, Layout(dp_replicate=2, dp_shard=8)),
        ({"strategy": "hsdp", "dp_shard": 4}, 16, 8, Layout(dp_replicate=4, dp_shard=4)),
        ({"strategy": "hsdp", "dp_replicate": 2}, 8, 8, Layout(dp_replicate=2, dp_shard=4)),
        ({"strategy": "hsdp", "tp": 2}, 8, 8, Layout(dp_shard=4, tp=2)),
        ({"strategy": "hsdp", "tp": 2}, 16, 8, Layout(dp_replicate=2, dp_shard=4, tp=2)),
        ({"strategy": "hsdp", "pp": 2}, 8, 8, Layout(pp=2, dp_shard=4)),
        ({"strategy": "hsdp", "pp": 2}, 32, 8, Layout(pp=2, dp_replicate=2, dp_shard=8)),
        ({"strategy": "pipeline"}, 4, 4, Layout(pp=4)),
        ({"strategy": "pipeline", "dp_replicate": 2}, 8, 8, Layout(pp=4, dp_replicate=2)),
        ({"strategy": "diloco"}, 4, 4, Layout(dp_replicate=4)),
        ({"tp": 2}, 8, 8, Layout(dp_replicate=4, tp=2)),
        ({"strategy": "fsdp", "tp": 2, "pp": 2}, 8, 8, Layout(pp=2, dp_shard=2, tp=2)),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "pp": 2}, 16, 8, Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)),
    ],
)
def test_sizes_follow_from_strategy_and_world_size(
    settings: dict[str, Any], world_size: int, per_node: int, layout: Layout
) -> None:
    assert resolve_layout(ParallelConfig(**settings), world_size, per_node) == layout


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ({"tp": 3}, 8),
        ({"dp_shard": 2, "dp_replicate": 2}, 8),
        ({"strategy": "hsdp", "dp_shard": 3}, 8),
        ({"strategy": "hsdp", "tp": 3}, 8),
        ({"strategy": "hsdp", "dp_replicate": 3}, 8),
    ],
)
def test_impossible_products_are_rejected_with_the_choices(settings: dict[str, Any], world_size: int) -> None:
    with pytest.raises(ConfigError, match=r"product .* 8, got .*1, 2, 4, 8"):
        resolve_layout(ParallelConfig(**settings), world_size, world_size)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "ddp", "dp_shard": 2}, "hsdp"),
        ({"strategy": "fsdp", "dp_replicate": 2}, "hsdp"),
        ({"strategy": "diloco", "tp": 2}, "diloco"),
        ({"strategy": "ddp", "cpu_offload": True}, "no effect without fsdp"),
        ({"strategy": "fsdp", "pipeline_schedule": "gpipe"}, "no effect without pipeline"),
        ({"strategy": "fsdp", "sync_every": 10}, "no effect without diloco"),
        ({"pp": 0}, "parallel.pp > 0"),
        ({"timeout": math.inf}, "parallel.timeout > 0 and finite, got inf"),
        ({"timeout": math.nan}, "parallel.timeout > 0 and finite, got nan"),
        ({"strategy": "diloco", "outer_lr": -1.0}, "parallel.outer_lr > 0 and finite, got -1"),
        ({"strategy": "diloco", "outer_momentum": 2.0}, r"parallel.outer_momentum in \[0, 1\), got 2"),
    ],
)
def test_settings_that_contradict_the_strategy_are_rejected(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**settings)


def test_a_layout_prints_only_the_sizes_above_one() -> None:
    assert str(Layout(dp_shard=4, tp=2)) == "dp_shard=4, tp=2"
    assert str(Layout()) == "one process"
