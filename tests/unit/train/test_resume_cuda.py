"""Runs on a GPU: exact resume in deterministic mode, asynchronous saves, with EMA and profiler enabled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.synchronization import forbid_synchronization

from whimbrel.checkpoint import list_checkpoints, read_component
from whimbrel.train import BaseTrainer, RunConfig, TrainerCallback, TrainingArguments, read_log, train

pytestmark = pytest.mark.gpu
MakeRun = Callable[..., RunConfig]
DEVICE = "cuda"


class Stop(TrainerCallback):
    """Stops a run with a save, as a signal does."""

    def __init__(self, after: int) -> None:
        self.after, self.is_draining = after, False

    def on_step_end(self, **event: Any) -> None:
        if event["state"].global_step == self.after:
            self.is_draining = True
            event["control"].should_training_stop = event["control"].should_save = True


def without_timings(run: Path) -> list[dict[str, Any]]:
    lines = read_log(run / "log.jsonl")
    timed = {"seconds", "peak_memory", "resumed"}
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


def tensors(node: Any) -> list[torch.Tensor]:
    if isinstance(node, dict):
        return [tensor for value in node.values() for tensor in tensors(value)]
    return [node] if isinstance(node, torch.Tensor) else []


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_is_bit_identical(make_run: MakeRun, tmp_path: Path, optimizer: str, precision: str) -> None:
    settings = {
        "train__device": DEVICE, "train__deterministic": True, "train__precision": precision, "train__clip": 1.0,
        "optim__name": optimizer, "checkpoint__every": 3, "validation__every": 4, "train__steps": 10, "ema__decay": 0.9,
        "log__every": 3,
    }  # fmt: skip
    uninterrupted = make_run(output_dir=tmp_path / "uninterrupted", **settings)
    interrupted = make_run(output_dir=tmp_path / "interrupted", **settings)
    train(uninterrupted)
    for after in (2, 7, 99):
        train(interrupted, callbacks=[Stop(after)])
    assert without_timings(interrupted.output_dir) == without_timings(uninterrupted.output_dir)
    paths = [list_checkpoints(run.output_dir)[10] for run in (uninterrupted, interrupted)]
    for key in ("optimizer", "callbacks", "trainer", "rng.rank-00000"):
        a, b = (tensors(read_component(path, key)) for path in paths)
        assert len(a) == len(b)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), key
    assert (paths[0] / "model/model.safetensors").read_bytes() == (paths[1] / "model/model.safetensors").read_bytes()


def test_dropout_is_identical_after_a_resume(tmp_path: Path) -> None:
    def fit(name: str, stop: int = 0, resume: bool = False) -> BaseTrainer:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 2))
        rows = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 2) for i in range(40)]
        trainer = BaseTrainer(
            TrainingArguments(
                output_dir=str(tmp_path / name), max_steps=9, save_steps=100, logging_steps=2,
                float32_matmul_precision="highest",
            ),
            model, train_dataset=rows, callbacks=[Stop(stop)],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer

    uninterrupted = fit("uninterrupted")
    fit("interrupted", stop=4)
    again = fit("interrupted", resume=True)
    assert again.state.log_history == uninterrupted.state.log_history
    for a, b in zip(uninterrupted.unwrapped_model().parameters(), again.unwrapped_model().parameters(), strict=True):
        assert torch.equal(a, b)


def test_steps_do_not_wait_for_the_device(make_run: MakeRun) -> None:
    """A step that synchronizes with the device raises here; logging, evaluation and saving may synchronize."""
    modes = []
    stack = contextlib.ExitStack()

    class Strict(TrainerCallback):
        def on_step_begin(self, **event: Any) -> None:
            modes.append(event["state"].global_step)
            if event["state"].global_step > 2:  # after the first steps have created the optimizer state
                stack.enter_context(forbid_synchronization())

        def on_pre_optimizer_step(self, **event: Any) -> None:
            assert event["model"].lm_head.weight.grad is not None

        def on_step_end(self, **event: Any) -> None:
            stack.close()

    with stack:
        train(make_run(train__device="cuda", train__clip=1.0), callbacks=[Strict()])
    assert modes == list(range(6))
