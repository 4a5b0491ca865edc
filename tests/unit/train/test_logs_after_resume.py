"""Logging callbacks in a run that is interrupted and resumed write what an uninterrupted run writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from whimbrel.model_io import load_model
from whimbrel.train import RunConfig, TrainerCallback, train
from whimbrel.train.run_directory import read_log

TIMED = {"seconds", "peak_memory", "resumed"}


class StopAt(TrainerCallback):
    """Requests a stop after a step, or an abort, which like a crash loses the steps after the last save."""

    def __init__(self, step: int, *, abort: bool) -> None:
        self.step, self.abort = step, abort

    def on_step_end(self, **event: Any) -> None:
        if event["state"].global_step == self.step:
            event["control"].should_abort_without_save = self.abort
            event["control"].should_training_stop = True


def run_session(config: RunConfig, *own: TrainerCallback) -> None:
    train(config, callbacks=own, sample_func=lambda model, tokenizer, step: f"after {step}: {model.training}")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMED} for line in read_log(folder / "log.jsonl")]


def test_logs_and_ema_after_two_resumes_match_an_uninterrupted_run(make_run: Any, tmp_path: Path) -> None:
    settings = {
        "train__steps": 12, "validation__every": 3, "sample__every": 2, "checkpoint__every": 4, "log__every": 2,
        "log__norms": 3, "ema__decay": 0.9, "ema__every": 2, "early_stopping__patience": 50,
        "divergence__action": "stop", "divergence__detector": "window",
    }  # fmt: skip
    run_session(make_run(output_dir=tmp_path / "uninterrupted", **settings))
    interrupted = make_run(output_dir=tmp_path / "interrupted", **settings)
    run_session(interrupted, StopAt(6, abort=True))  # resumes from step 4
    run_session(interrupted, StopAt(11, abort=True))  # resumes from step 8
    run_session(interrupted)
    uninterrupted = lines(tmp_path / "uninterrupted")
    assert lines(tmp_path / "interrupted") == uninterrupted
    kinds = [line["kind"] for line in uninterrupted]
    assert [kinds.count(kind) for kind in ("step", "validation", "sample", "log")] == [12, 4, 6, 6 + 4]
    states = [
        load_file(tmp_path / name / "checkpoints/step-00000012/callbacks.safetensors")
        for name in ("uninterrupted", "interrupted")
    ]
    assert states[0].keys() == states[1].keys() != set()
    assert all(states[0][name].equal(states[1][name]) for name in states[0])
    models = [
        load_model(tmp_path / name / "ema/step-00000012").state_dict() for name in ("uninterrupted", "interrupted")
    ]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])
    trained = load_model(tmp_path / "uninterrupted/checkpoints/step-00000012/model").state_dict()
    assert not all(trained[name].equal(models[0][name]) for name in trained)


def test_tensorboard_shows_one_curve_after_two_resumes(make_run: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_run(train__steps=12, checkpoint__every=4, validation__every=3, log__tensorboard=True)
    run_session(config, StopAt(6, abort=True))
    run_session(config, StopAt(11, abort=True))
    run_session(config)
    (folder,) = (config.output_dir / "runs").iterdir()
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 13))
    assert [event.step for event in events.Scalars("eval/loss")] == [3, 6, 9, 12]
    logged = {line["after"]: line["loss"] for line in lines(config.output_dir) if line["kind"] == "step"}
    assert {event.step: event.value for event in events.Scalars("train/loss")} == pytest.approx(logged, rel=1e-6)


def test_early_stopping_and_divergence_stop_a_run(make_run: Any, tmp_path: Path) -> None:
    patient = make_run(
        output_dir=tmp_path / "a", train__steps=20, validation__every=1, early_stopping__patience=2,
        early_stopping__threshold=100.0,
    )  # fmt: skip
    run_session(patient)
    assert [line["after"] for line in lines(tmp_path / "a") if line["kind"] == "step"] == [1, 2, 3]
    wild = make_run(
        output_dir=tmp_path / "b", train__steps=60, optim__lr=3.0, schedule__name="constant", schedule__warmup_steps=0,
        divergence__action="abort", divergence__threshold=5.0, divergence__fast=0.5,
    )  # fmt: skip
    run_session(wild)
    steps = [line for line in lines(tmp_path / "b") if line["kind"] == "step"]
    assert len(steps) < 60
    assert not (tmp_path / "b" / "checkpoints").exists()
