"""A checkpoint of any number of ranks continues on any other: the losses are those of the unbroken run.

The cells here are a sample; scripts/reshard runs all of them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import resharding_jobs as jobs
from tests.distributed import trainer_jobs
from tests.distributed.pool import Pool

from whimbrel.checkpoint import SavedTensor, latest_checkpoint
from whimbrel.checkpoint.sharded import read_saved
from whimbrel.train.config import CheckpointConfig, ResumeConfig

TOLERANCE = 1e-5
"""fp32 sums in another order; a step of each optimizer amplifies them little."""
DDP, FSDP, PIPELINE = {"strategy": "ddp"}, {"strategy": "fsdp"}, {"strategy": "pipeline"}
TP = {"tp": 2}
Cell = tuple[str, tuple[int, dict[str, Any]], list[tuple[int, dict[str, Any]]]]
CELLS: list[Cell] = [
    ("adamw", (3, FSDP), [(2, FSDP), (1, {}), (4, {"strategy": "hsdp", "dp_shard": 2})]),
    ("adamw", (4, {"strategy": "fsdp", "tp": 2}), [(2, {"tp": 2}), (1, {})]),
    ("adamw8bit", (2, FSDP), [(3, FSDP), (2, DDP)]),
    ("muon", (2, DDP), [(3, FSDP)]),
    ("galore_warm", (3, FSDP), [(4, FSDP), (2, DDP)]),
    ("qgalore", (4, FSDP), [(3, FSDP), (1, {})]),
]
STAGES: list[Cell] = [
    ("gpt2", (2, PIPELINE), [(1, {}), (2, FSDP), (4, {"pp": 2, "tp": 2})]),
    ("llama", (4, {"pp": 2, "tp": 2}), [(2, TP), (2, PIPELINE | {"pipeline_schedule": "interleaved"}), (1, {})]),
]
if os.environ.get("WHIMBREL_SOAK", "0") != "0":
    CELLS.append(("adamw", (2, TP), [(4, {"strategy": "fsdp", "tp": 2}), (3, FSDP)]))
    STAGES.append(("llama", (2, FSDP), [(4, {"pp": 2, "tp": 2})]))


@pytest.fixture(scope="module")
def unbroken(pool: Pool) -> dict[str, list[float]]:
    return {name: pool.run(1, jobs.train, None, {}, name)[0][0] for name in {name for name, *_ in CELLS}}


@pytest.mark.parametrize(("optimizer", "saved", "loaded"), CELLS, ids=str)
def test_run_continues_on_other_ranks(
    pool: Pool, unbroken: dict[str, list[float]], tmp_path: Path, optimizer: str, saved: Any, loaded: Any
) -> None:
    size, settings = saved
    before = pool.run(size, jobs.train, tmp_path, settings, optimizer)[0][0]
    expected = unbroken[optimizer]
    assert before == pytest.approx(expected[: jobs.BEFORE], rel=TOLERANCE)
    for size, settings in loaded:
        for losses, _ in pool.run(size, jobs.resume, tmp_path, settings, optimizer):
            assert losses == pytest.approx(expected[jobs.BEFORE :], rel=TOLERANCE), (size, settings)


@pytest.mark.parametrize(("size", "settings"), [(2, FSDP), (3, DDP)], ids=str)
def test_same_layout_continues_bit_identically(pool: Pool, tmp_path: Path, size: int, settings: dict[str, Any]) -> None:
    """In bf16, where a wrong rounding anywhere would show; three replicas also add gradients in the same order."""
    unbroken = pool.run(size, jobs.train, None, settings, "galore_warm_int8", "bfloat16")
    pool.run(size, jobs.train, tmp_path, settings, "galore_warm_int8", "bfloat16")
    resumed = pool.run(size, jobs.resume, tmp_path, settings, "galore_warm_int8", "bfloat16")
    assert resumed[0][0] == unbroken[0][0][jobs.BEFORE :]
    assert {digest for _, digest in resumed} == {unbroken[0][1]}


def test_ranks_write_their_rows_once_and_read_them_alone(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, jobs.train, tmp_path, FSDP, "galore_warm")
    path = latest_checkpoint(tmp_path)
    assert path is not None
    state = read_saved(path, "optimizer")["state"]
    saved = state["transformer.h.0.mlp.c_proj.weight"]
    moment, basis = saved["exp_avg"], saved["basis"]
    assert isinstance(moment, SavedTensor)
    assert moment.shape == (68, 4)
    files = sorted(file.name for file in path.glob("optimizer*"))
    assert files == ["optimizer.json", *(f"optimizer.rank-0000{rank}.safetensors" for rank in range(3))]
    assert [(part.file, part.offset) for part in moment._parts] == [
        (f"optimizer.rank-0000{rank}.safetensors", (23 * rank, 0)) for rank in range(3)
    ]
    assert [part.file for part in basis._parts] == ["optimizer.rank-00000.safetensors"]
    full = moment.full()
    assert torch.equal(moment.read((20, 1), (30, 2)), full[20:50, 1:3])
    assert torch.equal(torch.cat([moment.read((row, 0), (1, 4)) for row in range(68)]), full)


@pytest.mark.parametrize(("kind", "saved", "loaded"), STAGES, ids=str)
def test_trainer_continues_with_other_stages(
    pool: Pool, tmp_path: Path, kind: str, saved: tuple[int, dict[str, Any]], loaded: list[tuple[int, dict[str, Any]]]
) -> None:
    """Stages have different parameters; the tied embedding of GPT-2 is in the first and in the last."""

    def train(name: str, size: int, settings: dict[str, Any], steps: int) -> list[float]:
        replicas = 2 if settings == FSDP else 1
        config = trainer_jobs.make_config(
            tmp_path / name, settings, steps, {"accumulation": 4 // replicas}, checkpoint=CheckpointConfig(),
            resume=ResumeConfig(latest=True),
        )  # fmt: skip
        return [entry["loss"] for entry in pool.run(size, trainer_jobs.run, config, kind)[0] if "loss" in entry]

    expected = train("unbroken", 1, {}, 5)
    train("saved", *saved, 3)
    for index, (size, settings) in enumerate(loaded):
        shutil.copytree(tmp_path / "saved", tmp_path / f"loaded-{index}")
        losses = train(f"loaded-{index}", size, settings, 5)
        assert losses[-2:] == pytest.approx(expected[-2:], rel=TOLERANCE), (size, settings)
