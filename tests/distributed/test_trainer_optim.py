"""Training runs with each optimizer and precision on two ranks equal those of one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import trainer_optim_jobs as jobs
from tests.distributed.pool import Pool
from tests.support.runs import prepare_text

RANKS = 2
LOW_RANK = {"optim.rank": 8, "optim.gap": 4}
IN_BACKWARD = {"train.optimizer_in_backward": True}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw8bit": {"optim.name": "adamw8bit"},
    "muon": {"optim.name": "muon"},
    "galore_warm": {"optim.name": "galore_warm", **LOW_RANK},
    "galore_warm in backward": {"optim.name": "galore_warm", **LOW_RANK, **IN_BACKWARD},
    "galore": {"optim.name": "galore", **LOW_RANK},
}
DDP_ONLY: dict[str, dict[str, Any]] = {
    "projected linears": {**OPTIMIZERS["galore_warm in backward"], "train.projected_linears": True},
    "apollo": {"optim.name": "apollo", **LOW_RANK},
    "apollo_mini": {"optim.name": "apollo_mini"},
    "fira": {"optim.name": "fira", **LOW_RANK},
    "ldadam": {"optim.name": "ldadam", "optim.rank": 8},
    "qgalore": {"optim.name": "qgalore", **LOW_RANK},
}
CASES = [
    *((name, changes, strategy) for name, changes in OPTIMIZERS.items() for strategy in ("ddp", "fsdp")),
    *((name, changes, "ddp") for name, changes in DDP_ONLY.items()),
]
NewRun = Callable[[], Path]


@pytest.fixture(scope="module")
def new_run(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> NewRun:
    """Creates directories for runs, with the same token shards."""
    prepared = tmp_path_factory.mktemp("text")
    prepare_text(prepared, shakespeare[:40_000])

    def make() -> Path:
        folder = tmp_path_factory.mktemp("run")
        (folder / "shards").symlink_to(prepared / "shards")
        return folder

    return make


@pytest.fixture(scope="module")
def alone(new_run: NewRun) -> Callable[[dict[str, Any]], jobs.Run]:
    """Trains in one process; a second run with the same settings is not repeated."""
    runs: dict[str, jobs.Run] = {}

    def train(changes: dict[str, Any]) -> jobs.Run:
        key = repr(changes)
        if key not in runs:
            runs[key] = jobs.train(new_run(), 1, changes)
        return runs[key]

    return train


@pytest.mark.parametrize(("name", "changes", "strategy"), CASES, ids=lambda value: value if type(value) is str else "")
def test_optimizer_trains_like_one_process(
    pool: Pool, new_run: NewRun, alone: Callable[..., jobs.Run], name: str, changes: dict[str, Any], strategy: str
) -> None:
    """Sums in another order: 1e-6 a step. Low-bit states round those differences up to one quantization step."""
    expected = alone(changes)
    first, second = pool.run(RANKS, jobs.train, new_run(), RANKS, {**changes, "parallel.strategy": strategy})
    assert min(expected.norms) > 0.5  # every step is clipped
    assert first.losses == pytest.approx(expected.losses, abs=1e-5)
    # Replicas that average projections estimate the norm in steps with a refresh, where one process has full gradients.
    estimated = "train.optimizer_in_backward" in changes and strategy == "ddp"
    assert first.norms == pytest.approx(expected.norms, rel=1e-2 if estimated else 1e-4)
    assert all(torch.equal(first.weights[key], second.weights[key]) for key in first.weights)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon", "galore_warm"])
def test_sharded_state_takes_a_share_of_the_memory(
    pool: Pool, new_run: NewRun, alone: Callable[..., jobs.Run], name: str
) -> None:
    """Half on each of two ranks, apart from bases, which are replicated, and a step count per parameter."""
    changes = OPTIMIZERS[name]
    full = alone(changes).state_bytes
    settings = {**changes, "parallel.strategy": "fsdp", "train.steps": 2}
    for run in pool.run(RANKS, jobs.train, new_run(), RANKS, settings):
        assert full / RANKS <= run.state_bytes < (0.6 if name == "galore_warm" else 0.51) * full


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({**DDP_ONLY["apollo"], "parallel.strategy": "fsdp"}, "optim.name = apollo .* fsdp shards: use galore_warm"),
        ({**DDP_ONLY["projected linears"], "parallel.strategy": "fsdp"}, "does not work with train.projected_linears"),
        (IN_BACKWARD | {"train.tokens_per_step": 256, "train.clip": None}, "does not work with 2 processes"),
        ({**OPTIMIZERS["muon"], "parallel.tp": 2}, "optim.name = muon .* parallel.tp = 2 splits: use adamw"),
    ],
)
def test_optimizer_that_does_not_work_with_a_strategy_is_rejected(
    pool: Pool, new_run: NewRun, changes: dict[str, Any], pattern: str
) -> None:
    for error in pool.run(RANKS, jobs.error_of_run, new_run(), RANKS, changes):
        assert re.match(f"ConfigError: .*{pattern}", error)
