"""Timed saves: they limit lost work and change nothing else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError
from whimbrel.checkpoint import CheckpointManager, SharingPattern, StateComponent, list_checkpoints, read_manifest
from whimbrel.train import RunConfig, TrainerCallback, TrainingArguments, load_run_config, read_log, train
from whimbrel.train.arguments import from_config, to_config

Make = Callable[..., Any]
MakeRun = Callable[..., RunConfig]
ALWAYS = 1e-9
"""Minutes that have passed after any step."""


class Abort(TrainerCallback):
    """Ends a run as a crash would: nothing is saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, **event: Any) -> None:
        event["control"].should_abort_without_save |= event["state"].global_step == self.step


def lines(run: Path) -> list[tuple[Any, ...]]:
    return [(line["kind"], line["after"], line.get("loss")) for line in read_log(run / "log.jsonl")]


def weights(run: Path) -> list[bytes]:
    last = max(list_checkpoints(run).values())
    return [(last / name).read_bytes() for name in ("model/model.safetensors", "optimizer.safetensors")]


def test_timed_saves_default_to_ten_minutes(make_run: MakeRun) -> None:
    for config in (make_run(), to_config(TrainingArguments()), load_run_config("gpt2-fast-20m")):
        assert (config.checkpoint.every_minutes, config.checkpoint.at_end) == (10, True)


@pytest.mark.parametrize("minutes", [3.0, None])
def test_save_minutes_can_be_set_in_arguments_and_config(make_run: MakeRun, minutes: float | None) -> None:
    assert to_config(TrainingArguments(save_minutes=minutes)).checkpoint.every_minutes == minutes
    config = make_run(checkpoint__every=2, checkpoint__every_minutes=minutes)
    assert config.checkpoint.every_minutes == minutes
    assert from_config(config).save_minutes == minutes


def test_save_strategy_no_disables_timed_saves(caplog: pytest.LogCaptureFixture) -> None:
    assert to_config(TrainingArguments(save_strategy="no")).checkpoint.every_minutes is None
    assert "no effect" not in caplog.text
    TrainingArguments(save_strategy="no", save_minutes=3)
    assert "save_minutes = 3.0 has no effect" in caplog.text


@pytest.mark.parametrize("minutes", [0, -1.0])
def test_minutes_must_be_positive(make_run: MakeRun, minutes: float) -> None:
    with pytest.raises(ConfigError, match="save_minutes > 0, got"):
        TrainingArguments(save_minutes=minutes)
    with pytest.raises(ConfigError, match=r"checkpoint\.every_minutes > 0, got"):
        make_run(checkpoint__every_minutes=minutes)


def test_crashed_run_resumes_from_the_timed_save(make_run: MakeRun, tmp_path: Path) -> None:
    """With a recipe that saves at the end only."""
    settings = {"validation__every": 2, "checkpoint__best": 1, "checkpoint__evaluate": True, "log__every": 2}
    train(make_run(output_dir=tmp_path / "uninterrupted", checkpoint__every_minutes=None, **settings))
    interrupted = make_run(output_dir=tmp_path / "interrupted", checkpoint__every_minutes=ALWAYS, **settings)
    train(interrupted, callbacks=[Abort(5)])
    assert list(list_checkpoints(interrupted.output_dir)) == [4]  # only the newest is kept
    train(interrupted)
    assert list(list_checkpoints(interrupted.output_dir)) == list(list_checkpoints(tmp_path / "uninterrupted")) == [6]
    assert lines(interrupted.output_dir) == lines(tmp_path / "uninterrupted")
    assert weights(interrupted.output_dir) == weights(tmp_path / "uninterrupted")


@pytest.mark.parametrize("keep", [None, 1, 2])
def test_timed_saves_do_not_affect_regular_checkpoints(make_run: MakeRun, tmp_path: Path, keep: int | None) -> None:
    kept = []
    for name, minutes in (("plain", None), ("clock", ALWAYS)):
        config = make_run(
            output_dir=tmp_path / name, train__steps=8, checkpoint__every=3, checkpoint__keep=keep, checkpoint__best=1,
            validation__every=3, checkpoint__every_minutes=minutes,
        )  # fmt: skip
        train(config)
        found = list_checkpoints(config.output_dir)
        kept.append({step: read_manifest(path).metric for step, path in found.items()})
    assert kept[0] == kept[1]


def test_save_timer_restarts_after_every_save(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    now, saved = [0.0], []
    monkeypatch.setattr(
        "whimbrel.train.trainer.time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    )

    class Minute(TrainerCallback):
        def on_step_begin(self, **event: Any) -> None:
            now[0] += 60.0

        def on_save(self, **event: Any) -> None:
            saved.append(event["step"])

    config = make_run(
        train__steps=12, checkpoint__every=5, checkpoint__every_minutes=3.0, checkpoint__asynchronous=False
    )
    train(config, callbacks=[Minute()])
    assert saved == [3, 5, 8, 10, 12]


def test_rollback_prefers_the_regular_checkpoint(args: Make, fit: Make) -> None:
    """The time of a timed save must not determine where a run rolls back to."""
    calls, went = [0], []

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        calls[0] += 1
        value = nn.functional.cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch
        return value * float("nan") if calls[0] == 6 else value

    class Rewound(TrainerCallback):
        def on_rollback(self, **event: Any) -> None:
            went.append(event["step"])

    settings = args(on_nonfinite="rollback", save_strategy="steps", save_steps=3, save_minutes=ALWAYS)
    fit(settings, compute_loss_func=loss, callbacks=[Rewound()])
    assert went == [3]


def test_temporary_checkpoint_can_be_made_permanent(tmp_path: Path) -> None:
    class State:
        def state_dict(self) -> dict[str, Any]:
            return {"w": torch.ones(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            del state

    parts = [StateComponent("model", State(), SharingPattern.GLOBAL)]
    manager = CheckpointManager(tmp_path)
    manager.save(1, parts, temporary=True)
    manager.save(1, parts)
    manager.save(2, parts, temporary=True)
    manager.save(3, parts, temporary=True)
    assert list(list_checkpoints(tmp_path)) == [1, 3]
    fresh = CheckpointManager(tmp_path)  # the process that wrote it was killed
    fresh.clean_up(3)
    fresh.save(4, parts)
    assert list(list_checkpoints(tmp_path)) == [1, 4]


def test_start_from_scratch_is_logged(make_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    config = make_run()
    with caplog.at_level(logging.INFO, "whimbrel"):
        train(config)
        assert caplog.text.count("starting a new run") == 1
        caplog.clear()
        train(make_run(train__steps=7))
    assert "starting a new run" not in caplog.text
