"""`log.jsonl` stays consistent across resumes, rollbacks and full disks."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whimbrel.train.callbacks import loggers
from whimbrel.train.callbacks.loggers import JsonlLogger
from whimbrel.train.run_directory import read_log


def run_session(make_run: Any, first: int, last: int) -> None:
    run = make_run(JsonlLogger(), steps=6).begin(first)
    for step in range(first, last):
        run.step(loss=3 - step / 10)
        if run.state.global_step % 2 == 0:
            run.evaluate(loss=2.5, accuracy=0.25)
            run.dispatch("on_sample", text="O Romeo", step=run.state.global_step)
    run.end()


def test_steps_evaluations_samples_and_logs_are_written(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonlLogger(), steps=6).begin()
    run.step(loss=2.0)
    run.evaluate(loss=1.5, accuracy=0.0)
    run.dispatch("on_sample", text="Ay, me!\n", step=1)
    run.log({"norm/a": 0.25, "epoch": 0.5})
    run.end()
    lines = read_log(tmp_path / "run" / "log.jsonl")
    assert lines[0].pop("peak_memory") > 2**20
    assert lines == [
        {"kind": "step", "after": 1, "total": 6, "loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "seconds": 0.5,
         "tokens": 256},
        {"kind": "validation", "after": 1, "loss": 1.5, "eval_accuracy": 0.0},
        {"kind": "sample", "after": 1, "text": "Ay, me!\n"},
        {"kind": "log", "after": 1, "norm/a": 0.25, "epoch": 0.5},
    ]  # fmt: skip


def test_skipped_steps_are_marked(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonlLogger()).begin()
    run.step(loss=math.inf, skipped=True)
    run.end()
    assert read_log(tmp_path / "run" / "log.jsonl")[0]["skipped"] is True


def test_a_resumed_run_has_the_log_of_an_uninterrupted_one_with_its_resumes_marked(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whimbrel.train.callbacks.loggers.peak_memory", lambda device: 2**30)
    log = tmp_path / "run" / "log.jsonl"
    run_session(make_run, 0, 6)
    uninterrupted = log.read_bytes()
    log.unlink()
    run_session(make_run, 0, 5)
    with log.open("a") as file:
        file.write('{"kind": "step", "aft')  # the line that was being written when it was killed
    run_session(make_run, 2, 5)
    run_session(make_run, 4, 6)
    assert [line["after"] for line in read_log(log) if line.get("resumed")] == [3, 5]
    assert log.read_bytes().replace(b', "resumed": true', b"") == uninterrupted


def test_a_rollback_removes_later_lines(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonlLogger()).begin()
    for loss in (3.0, 2.0, 9.0):
        run.step(loss=loss)
    run.state.global_step = 2
    run.dispatch("on_rollback", step=2)
    run.step(loss=1.5)
    run.end()
    assert [line["loss"] for line in read_log(tmp_path / "run" / "log.jsonl")] == [3.0, 2.0, 1.5]


def test_lines_are_valid_json_with_non_finite_losses(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonlLogger()).begin()
    run.step(loss=math.nan, grad_norm=math.inf)
    run.end()

    def fail_on_constant(word: str) -> None:
        raise ValueError(word)

    (line,) = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=fail_on_constant)
    assert record["loss"] is record["grad_norm"] is None


def test_lines_are_on_disk_immediately(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonlLogger()).begin()
    run.step(loss=1.0)
    assert len(read_log(tmp_path / "run" / "log.jsonl")) == 1  # the run has not ended: a kill now loses nothing
    run.fail()


def test_only_the_first_rank_writes(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonlLogger())
    run.state.is_world_process_zero = False
    run.begin().step(loss=1.0)
    run.end()
    assert not (tmp_path / "run").exists()


def test_user_logs_with_evaluation_names_are_written(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonlLogger(), steps=6).begin()
    run.step(loss=2.0)
    run.log({"eval_accuracy": 0.5})
    run.evaluate(loss=1.5)
    run.log({"eval_loss": 9.0, "epoch": 0.5})
    run.step(loss=1.0)
    run.log({"eval_bleu": 0.25})
    run.end()
    lines = [line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] != "step"]
    assert lines == [
        {"kind": "log", "after": 1, "eval_accuracy": 0.5},
        {"kind": "validation", "after": 1, "loss": 1.5},
        {"kind": "log", "after": 1, "eval_loss": 9.0, "epoch": 0.5},
        {"kind": "log", "after": 2, "eval_bleu": 0.25},
    ]


def test_logs_between_two_runs_are_not_written(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonlLogger()).begin()
    run.end()
    run.log({"eval_accuracy": 0.5})
    run.begin().step(loss=1.0)
    run.end()
    assert [line["kind"] for line in read_log(tmp_path / "run" / "log.jsonl")] == ["step"]


def test_any_value_can_be_logged(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonlLogger()).begin()
    run.log({
        "tensor": torch.tensor(0.5, requires_grad=True), "half": torch.tensor(2.0, dtype=torch.bfloat16),
        "scalar": np.float32(0.25), "count": np.int64(3), "array": np.array([1.0, math.nan]), "list": [1, math.inf],
        "nested": {"a": (math.nan, 2.0)}, "text": "good", "path": Path("a"), "none": None, "yes": True, "after": 9,
    })  # fmt: skip
    run.evaluate(judgement="good", loss=torch.tensor(1.5))
    run.end()
    first, second = read_log(tmp_path / "run" / "log.jsonl")
    assert first == {
        "kind": "log", "after": 0, "tensor": 0.5, "half": 2.0, "scalar": 0.25, "count": 3, "array": [1.0, None],
        "list": [1, None], "nested": {"a": [None, 2.0]}, "text": "good", "path": "a", "none": None, "yes": True,
        "after_": 9,
    }  # fmt: skip
    assert second == {"kind": "validation", "after": 0, "loss": 1.5, "eval_judgement": "good"}


def test_an_evaluation_without_a_loss_is_written(make_run: Any, tmp_path: Path) -> None:
    run = make_run(JsonlLogger()).begin()
    run.evaluate(accuracy=0.5)
    run.end()
    (line,) = read_log(tmp_path / "run" / "log.jsonl")
    assert line == {"kind": "validation", "after": 0, "loss": None, "eval_accuracy": 0.5}


@pytest.fixture
def fill_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A function that fills or frees a fake disk; on a full disk only five bytes of a line are written."""
    full, write = [False], os.write

    def limited(file: int, data: bytes) -> int:
        if not full[0] or os.fstat(file).st_ino != (tmp_path / "run" / "log.jsonl").stat().st_ino:
            return write(file, data)
        if data.startswith(b"{"):
            return write(file, data[:5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", limited)

    def fill(now: bool) -> None:
        full[0] = now

    return fill


def test_a_full_disk_logs_one_warning_and_loses_no_line(
    make_run: Any, tmp_path: Path, fill_disk: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "run" / "log.jsonl"
    run = make_run(JsonlLogger()).begin()
    run.step(loss=3.0)
    fill_disk(True)
    for loss in (2.0, 1.5):
        run.step(loss=loss)
        run.evaluate(loss=loss)
    assert [line["loss"] for line in read_log(log)] == [3.0]
    (warning,) = caplog.records
    assert f"cannot write {log}: No space left on device; training continues" in warning.message
    fill_disk(False)
    run.step(loss=1.0)
    assert [line["loss"] for line in read_log(log)] == [3.0, 2.0, 2.0, 1.5, 1.5, 1.0]
    assert caplog.records[-1].message == f"{log} is writable again"
    run.end()


def test_lines_lost_to_a_full_disk_are_counted(
    make_run: Any, tmp_path: Path, fill_disk: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "MAX_PENDING", 2)
    log = tmp_path / "run" / "log.jsonl"
    run = make_run(JsonlLogger()).begin()
    fill_disk(True)
    for loss in (4.0, 3.0, 2.0):
        run.step(loss=loss)
    fill_disk(False)
    run.step(loss=1.0)
    assert [line["loss"] for line in read_log(log)] == [2.0, 1.0]
    assert f"{log} is writable again; 2 lines were dropped" in caplog.text
    fill_disk(True)
    run.step(loss=0.5)
    run.end()
    assert f"could not write the last 1 lines of {log}" in caplog.text


def test_opening_the_log_is_retried(make_run: Any, tmp_path: Path, caplog: Any) -> None:
    log = tmp_path / "run" / "log.jsonl"
    log.mkdir(parents=True)
    run = make_run(JsonlLogger()).begin()
    run.step(loss=3.0)
    log.rmdir()
    run.step(loss=2.0)
    run.end()
    assert [line["loss"] for line in read_log(log)] == [3.0, 2.0]
    assert f"cannot write {log}" in caplog.text


def test_damaged_lines_are_moved_to_another_file(make_run: Any, tmp_path: Path, caplog: Any) -> None:
    log = tmp_path / "run" / "log.jsonl"
    run_session(make_run, 0, 4)
    whole = log.read_bytes()
    first = whole.index(b"\n") + 1
    log.write_bytes(whole[:first] + b"\0" * 80 + b"\n" + whole[first:])
    run_session(make_run, 4, 6)
    assert f"{log}:2 is damaged: removing this line and all after it" in caplog.text
    assert log.with_name("log.jsonl.damaged").read_bytes().endswith(whole[first:])
    assert [line["after"] for line in read_log(log) if line["kind"] == "step"] == [1, 5, 6]
