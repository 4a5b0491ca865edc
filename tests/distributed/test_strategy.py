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
