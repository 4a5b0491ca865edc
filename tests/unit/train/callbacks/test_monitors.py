"""Samples, norms, peak memory and profiler traces."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from whimbrel.train.callback import TrainerCallback
from whimbrel.train.callbacks import (
    MemoryCallback,
    NormsCallback,
    ProfilerCallback,
    SampleCallback,
)
from whimbrel.train.callbacks.loggers import JsonlLogger
from whimbrel.train.device import CLEAR_REFS, peak_memory, reset_peak_memory
from whimbrel.train.run_directory import read_log


def random_sampler(model: nn.Module, step: int) -> str:
    """Uses the global RNG, as a sampler does."""
    assert not model.training
    assert not torch.is_grad_enabled()
    return f"{step}: {float(torch.rand(()) + model(torch.randn(1, 4))):.3f}"


def test_samples_are_dispatched_and_logged(make_run: Any, tmp_path: Path) -> None:
    run = make_run(SampleCallback(random_sampler, every=2), JsonlLogger()).begin()
    for _ in range(5):
        run.step()
        assert run.model.training
    run.end()
    lines = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "sample"]
    assert [(line["after"], line["text"].partition(":")[0]) for line in lines] == [(2, "2"), (4, "4")]


def test_samples_do_not_affect_training(make_run: Any) -> None:
    with_samples = make_run(SampleCallback(random_sampler, every=1)).begin()
    losses = [with_samples.step() for _ in range(4)]
    without = make_run().begin()
    assert [without.step() for _ in range(4)] == losses


def test_on_sample_can_stop_the_run(make_run: Any) -> None:
    class StopOnSample(TrainerCallback):
        def on_sample(self, **event: Any) -> None:
            event["control"].should_training_stop = True

    run = make_run(SampleCallback(random_sampler, every=1), StopOnSample()).begin()
    run.step()
    assert run.control.should_training_stop
    assert run.callbacks.stopped_by.callback == "StopOnSample"


def test_norms_of_parameters_and_gradients_are_logged(make_run: Any) -> None:
    run = make_run(NormsCallback(every=2)).begin()
    run.step()
    assert run.state.log_history == []
    before = {name: value.norm().item() for name, value in run.model.named_parameters()}
    gradients: dict[str, float] = {}

    class RecordGradNorms(TrainerCallback):
        def on_pre_optimizer_step(self, **event: Any) -> None:
            gradients.update({name: own.grad.norm().item() for name, own in event["model"].named_parameters()})

    run.callbacks.add(RecordGradNorms())
    run.step()
    (logs,) = run.state.log_history
    expected = {f"grad_norm/{name}": norm for name, norm in gradients.items()}
    expected |= {f"weight_norm/{name}": norm for name, norm in before.items()}
    assert logs == pytest.approx(expected, rel=1e-6)
    assert len(logs) == 8


def test_peak_memory_is_logged(make_run: Any) -> None:
    run = make_run(MemoryCallback()).begin()
    logs = {"loss": 1.0}
    run.dispatch("on_log_step", logs=logs)
    assert logs["peak_memory"] > 2**20


@pytest.mark.parametrize(("first_step", "last"), [(0, 6), (3, 6), (0, 3)])
def test_a_trace_of_the_selected_steps_is_written(make_run: Any, tmp_path: Path, first_step: int, last: int) -> None:
    run = make_run(ProfilerCallback(2, 4)).begin(first_step)
    while run.state.global_step < last:
        run.step()
    run.end()
    (trace,) = (tmp_path / "run").iterdir()
    assert trace.name == "trace-2-4.json.gz"
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("Optimizer.step#")]
    assert len(steps) == min(last, 4) - max(first_step, 2)


def test_no_trace_is_written_for_steps_already_done(make_run: Any, tmp_path: Path) -> None:
    run = make_run(ProfilerCallback(2, 4)).begin(4)
    run.step()
    run.end()
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="the system cannot reset the peak")
def test_peak_memory_can_be_reset() -> None:
    device = torch.device("cpu")
    memory = torch.ones(100_000_000)
    peak = peak_memory(device)
    del memory
    reset_peak_memory(device)
    assert peak_memory(device) < peak - 200_000_000
