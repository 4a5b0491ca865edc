"""Every layout trains like one process: equal losses and gradient norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed import strategy_jobs as jobs
from tests.distributed.pool import Pool

TOLERANCE = 1e-5
"""fp32 sums in another order; 6 steps of AdamW amplify them little."""
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"strategy": "fsdp"}),
    (2, {"strategy": "fsdp", "reshard_after_forward": False}),
    (4, {"strategy": "hsdp", "dp_shard": 2}),
    (2, {"tp": 2}),
    (4, {"tp": 2}),
    (4, {"tp": 2, "strategy": "fsdp"}),
    *((2, {"strategy": "pipeline", "pipeline_schedule": name}) for name in ("gpipe", "1f1b", "interleaved")),
    (2, {"strategy": "pipeline", "pipeline_schedule": "zero-bubble"}),
    (4, {"pp": 2}),
    (4, {"pp": 2, "strategy": "fsdp"}),
    (4, {"pp": 2, "tp": 2}),
]


@pytest.fixture(scope="module", params=list(jobs.MODELS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(kind: str) -> jobs.Curve:
    return jobs.train_alone(kind)


@pytest.mark.parametrize(("world_size", "settings"), LAYOUTS, ids=str)
def test_a_layout_trains_like_one_process(
    pool: Pool, kind: str, expected: jobs.Curve, world_size: int, settings: dict[str, Any]
) -> None:
    for curve in pool.run(world_size, jobs.train, settings, kind):
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), rtol=TOLERANCE, atol=TOLERANCE)


def test_diloco_applies_nesterov_momentum_to_the_mean_delta(pool: Pool) -> None:
    """Every two steps both ranks move by the mean of their deltas, 2 * 0.015, through the outer optimizer."""
    settings = {"sync_every": 2, "outer_lr": 0.5, "outer_momentum": 0.5}
    (first, sent), (second, _) = pool.run(2, jobs.outer_steps, settings, 4)
    anchor, momentum = torch.linspace(-1, 1, 512), 0.0
    for step in (1, 3):
        momentum = 0.5 * momentum + 0.03
        anchor = anchor - 0.5 * (0.03 + 0.5 * momentum)
        assert first[step] == second[step]
        torch.testing.assert_close(torch.tensor(first[step]), anchor)
    assert first[0] != second[0]
    assert sent == 2 * 512 * 4


def test_int8_deltas_send_two_bytes_per_value(pool: Pool) -> None:
    settings = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "delta_dtype": "int8"}
    (first, sent), (second, _) = pool.run(2, jobs.outer_steps, settings, 4)
    assert first[3] == second[3]
    # A block of equal deltas is exact in int8 up to the rounding of its scale.
    torch.testing.assert_close(torch.tensor(first[3]), torch.linspace(-1, 1, 512) - 0.06, rtol=0, atol=1e-6)
    values, scales = 512 + 256, (2 + 1) * 4  # all of them to the rank that averages them, then its half
    assert sent == 2 * (values + scales)


def test_fragments_are_synchronized_at_different_steps(pool: Pool) -> None:
    settings = {"sync_every": 4, "outer_lr": 1.0, "outer_momentum": 0.0, "fragments": 2}
    (first, _), (second, _) = pool.run(2, jobs.outer_steps, settings, 4)
    assert first[3] == second[3]  # a single tensor is a single fragment
    assert first[1] != second[1]
