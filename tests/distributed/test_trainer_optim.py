"""Training runs with each optimizer and precision on two ranks equal those of one process."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import trainer_optim_jobs as jobs
from tests.distributed.pool import Pool
from tests.support.runs import prepare_text

from whimbrel.distributed.layout import resolve_layout
from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig
from whimbrel.train.memory_mesh import predict_mesh_memory
from whimbrel.train.run_config import build_run_config

RANKS = 2
STEPS = 50 if os.environ.get("WHIMBREL_SOAK", "0") != "0" else 12
LONG_RUNS = ("adamw", "adamw8bit", "muon", "galore_warm", "galore")
"""Those whose sums differ only in their order; others amplify differences, or estimate the norm in some steps."""
LOW_RANK = {"optim.rank": 8, "optim.gap": 4}
IN_BACKWARD = {"train.optimizer_in_backward": True}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw8bit": {"optim.name": "adamw8bit"},
    "muon": {"optim.name": "muon"},
    "normuon": {"optim.name": "muon", "optim.neuron_beta": 0.9, "optim.cautious_decay": True},
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
SAME_BATCHES = {"train.micro_batch": 4, "train.tokens_per_step": 256, "train.clip": None}
"""One micro-batch per rank, which is one of two in a single process: gradients are the same sums, bit for bit."""
LOW_PRECISION: dict[str, dict[str, Any]] = {
    "bf16": {"train.precision": "bf16"},
    "fp16": {"train.precision": "fp16"},
    "fp8": {"train.fp8_recipe": "tensorwise"},
    "qat": {"train.qat_recipe": "int8-dynamic-act-int4-weight"},
    "bf16 weights": {"train.default_dtype": "bfloat16", "optim.name": "adamw8bit"},
    "int8 weights": {"train.weight_dtype": "int8", "optim.name": "adamw8bit"},
}
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
    changes = {**changes, "train.steps": STEPS if name in LONG_RUNS else 12}
    expected = alone(changes)
    first, second = pool.run(RANKS, jobs.train, new_run(), RANKS, {**changes, "parallel.strategy": strategy})
    assert min(expected.norms) > 0.5  # every step is clipped
    assert first.losses == pytest.approx(expected.losses, abs=1e-5)
    # Replicas that average projections estimate the norm in steps with a refresh, where one process has full gradients.
    estimated = "train.optimizer_in_backward" in changes and strategy == "ddp"
    assert first.norms == pytest.approx(expected.norms, rel=1e-2 if estimated else 1e-4)
    assert all(torch.equal(first.weights[key], second.weights[key]) for key in first.weights)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", LOW_PRECISION)
def test_low_precision_trains_like_one_process(
    pool: Pool, new_run: NewRun, alone: Callable[..., jobs.Run], name: str, strategy: str
) -> None:
    """Bit for bit, except where a rank rounds something that a single process does not have.

    fp16 rounds gradients of a loss that is divided by the targets per rank; shards of weights that are rounded
    stochastically have their own random numbers.
    """
    if name in ("fp8", "qat"):
        pytest.importorskip("torchao")
    if strategy == "fsdp" and name == "int8 weights":
        pytest.skip("rejected")
    changes = LOW_PRECISION[name] | SAME_BATCHES | {"train.steps": 6}
    expected = alone(changes)
    first, second = pool.run(RANKS, jobs.train, new_run(), RANKS, {**changes, "parallel.strategy": strategy})
    stochastic = strategy == "fsdp" and name == "bf16 weights"
    tolerance = 1e-3 if stochastic else 1e-4 if name == "fp16" else 0.0
    assert first.losses == pytest.approx(expected.losses, rel=0, abs=tolerance)
    assert all(torch.equal(first.weights[key], second.weights[key]) for key in first.weights)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("format_name", [None, "int4"])
@pytest.mark.parametrize("library", ["peft", "ours"])
def test_adapters_train_like_one_process(
    pool: Pool, tmp_path: Path, library: str, format_name: str | None, strategy: str
) -> None:
    """LoRA on a dense and on a quantized model; its checkpoints resume on the same ranks and on one."""
    if library == "peft":
        pytest.importorskip("peft")
    train_adapter = functools.partial(jobs.train_adapter, library=library)
    expected = train_adapter(tmp_path / "one", 1, None, format_name)
    first, second = pool.run(RANKS, train_adapter, tmp_path / "two", RANKS, strategy, format_name)
    assert min(expected.norms) > 0.2  # every step is clipped
    assert first.losses == pytest.approx(expected.losses, abs=1e-5)
    assert all(torch.equal(first.weights[key], second.weights[key]) for key in first.weights)
    assert first.state_bytes < (0.51 if strategy == "fsdp" else 1.01) * expected.state_bytes
    checkpoint = str(tmp_path / "two/adapter/checkpoints/step-00000003")
    resumed, _ = pool.run(RANKS, train_adapter, tmp_path / "again", RANKS, strategy, format_name, checkpoint)
    assert resumed.losses == first.losses
    alone = train_adapter(tmp_path / "alone", 1, None, format_name, checkpoint)
    assert alone.losses == pytest.approx(first.losses, abs=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon", "galore_warm", "galore"])
def test_a_rank_allocates_what_was_predicted(pool: Pool, new_run: NewRun, name: str, strategy: str) -> None:
    """Parameters, gradients and optimizer state, up to the granularity of allocations."""
    folder, changes = new_run(), {**OPTIMIZERS[name], "parallel.strategy": strategy, "train.steps": 2}
    config = build_run_config(jobs.config_table(folder, RANKS, changes))
    (predicted,) = predict_mesh_memory(config, resolve_layout(config.parallel, RANKS, RANKS), "cpu")
    found = pool.run(RANKS, jobs.allocated_bytes, folder, RANKS, changes)
    most = max(found, key=sum)
    for category in ("weights", "gradients", "states"):
        allocated = getattr(most, category)
        assert allocated <= getattr(predicted, category) <= allocated + 64 * most.parameters, category


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("weights", [None, "int8"], ids=["dense", "int8"])
def test_a_rank_with_adapters_allocates_what_was_predicted(
    pool: Pool, new_run: NewRun, weights: str | None, strategy: str
) -> None:
    folder = new_run()
    save_model(GPT(GPTConfig(**jobs.MODEL)), folder / "base")
    changes = {"model.path": str(folder / "base"), "lora.rank": 4, "parallel.strategy": strategy, "train.steps": 2}
    changes |= {} if weights is None else {"model.weights": weights}
    config = build_run_config(jobs.config_table(folder, RANKS, changes))
    (predicted,) = predict_mesh_memory(config, resolve_layout(config.parallel, RANKS, RANKS), "cpu")
    most = max(pool.run(RANKS, jobs.allocated_bytes, folder, RANKS, changes), key=sum)
    assert most.gradients < most.weights / 5
    for category in ("weights", "gradients", "states"):
        allocated = getattr(most, category)
        assert allocated <= getattr(predicted, category) <= allocated + 64 * most.parameters, category


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({**DDP_ONLY["apollo"], "parallel.strategy": "fsdp"}, "optim.name = apollo .* fsdp shards: use galore_warm"),
        ({**DDP_ONLY["projected linears"], "parallel.strategy": "fsdp"}, "does not work with train.projected_linears"),
        (LOW_PRECISION["int8 weights"] | {"parallel.strategy": "fsdp"}, "fsdp cannot shard .* quantized .*: use ddp"),
        (IN_BACKWARD | {"train.tokens_per_step": 256, "train.clip": None}, "does not work with 2 processes"),
        ({**OPTIMIZERS["muon"], "parallel.tp": 2}, "optim.name = muon .* parallel.tp = 2 splits: use adamw"),
    ],
)
def test_optimizer_that_does_not_work_with_a_strategy_is_rejected(
    pool: Pool, new_run: NewRun, changes: dict[str, Any], pattern: str
) -> None:
    for error in pool.run(RANKS, jobs.error_of_run, new_run(), RANKS, changes):
        assert re.match(f"ConfigError: .*{pattern}", error)
