"""Reading and truncating log.jsonl; restarted processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from whimbrel.base.errors import DataError
from whimbrel.distributed import World
from whimbrel.train.config import TrainConfig, TrainerConfig
from whimbrel.train.run_directory import (
    READ_BLOCK_BYTES,
    last_line,
    log_line,
    read_log,
    record_launch,
    resume_after_restart,
    truncate_log,
)


def step_line(step: int, loss: float) -> str:
    return log_line("step", step, {"loss": loss, "tokens": 1})


def test_last_step_reads_from_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("")
    assert last_line(log, "step") is None
    steps = "".join(step_line(n, n / 7) for n in range(1, 3001))
    text = log_line("sample", 3000, {"text": "x" * 3 * READ_BLOCK_BYTES})
    log.write_text(steps + text + '{"kind": "step", "after": 3001')
    assert log.stat().st_size > 4 * READ_BLOCK_BYTES
    assert last_line(log, "step") == [line for line in read_log(log) if line["kind"] == "step"][-1]


def test_a_kind_that_is_rare_or_missing_is_searched_with_little_memory(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    steps = "".join(step_line(n, n / 7) for n in range(1, 30_001))
    assert len(steps) > 20 * READ_BLOCK_BYTES
    log.write_text(log_line("validation", 0, {"loss": 5.0}) + steps)
    tracemalloc.start()
    try:
        assert last_line(log, "validation") == {"kind": "validation", "after": 0, "loss": 5.0}
        assert last_line(log, "sample") is None
        assert tracemalloc.get_traced_memory()[1] < 10 * READ_BLOCK_BYTES
    finally:
        tracemalloc.stop()


def test_truncating_a_log_removes_later_lines(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [step_line(n, 0.1 * n) for n in range(1, 6)]
    log.write_text("".join(lines) + lines[0][:9])
    truncate_log(log, 3)
    assert log.read_text() == "".join(lines[:3])
    truncate_log(tmp_path / "new.jsonl", 3)
    assert (tmp_path / "new.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"kind": "step"}\n', "'after' in .*:1"),
        ('{"kind": "step", "after": 1, "loss": 1, "tokens": 1}\nnonsense\n', "2 is not JSON"),
        ("3\n", "'kind' in .*:1"),
    ],
)
def test_an_invalid_log_raises_an_error(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(DataError, match=fault):
        read_log(tmp_path / "log.jsonl")


@pytest.mark.parametrize("module", ["whimbrel.train.run_directory", "whimbrel.train.control"])
def test_logs_and_control_are_importable_without_torch(module: str) -> None:
    program = f"import {module}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerConfig:
    """A run with a checkpoint that process 1 of a launch of torch elastic has saved."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    record_launch(tmp_path)
    return TrainerConfig(output_dir=tmp_path, overwrite_output_dir=True, train=TrainConfig(steps=1))


def test_restarted_process_resumes_instead_of_overwriting(
    launched: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 2)
    config = resume_after_restart(launched, World())
    assert (config.overwrite_output_dir, config.resume.latest) == (False, True)


@pytest.mark.parametrize("variables", [{}, {"TORCHELASTIC_RUN_ID": "another"}])
def test_first_start_of_a_launch_keeps_its_settings(
    launched: TrainerConfig, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 2)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert resume_after_restart(launched, World()) is launched


def test_one_process_may_train_twice_in_a_directory(launched: TrainerConfig) -> None:
    assert resume_after_restart(launched, World()) is launched


def test_launches_without_an_id_differ_by_their_agent(launched: TrainerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    record_launch(launched.output_dir)
    monkeypatch.setattr(os, "getpid", lambda: 2)
    assert resume_after_restart(launched, World()) is not launched
    monkeypatch.setattr(os, "getppid", lambda: 3)
    assert resume_after_restart(launched, World()) is launched
