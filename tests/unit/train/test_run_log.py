"""Reading logs while they are written, and smoothing."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from whimbrel.base.errors import DataError
from whimbrel.train import run_log
from whimbrel.train.run_directory import log_line, truncate_log
from whimbrel.train.run_log import RunLog, smooth


def append(log: Path, *steps: int, **fields: Any) -> None:
    with log.open("a") as file:
        for step in steps:
            file.write(log_line("step", step, {"loss": 1 / step, "tokens": 10, "seconds": 0.5, **fields}))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    append(tmp_path / "log.jsonl", 1, 2)
    return tmp_path / "log.jsonl"


def test_update_reads_only_what_was_added(log: Path) -> None:
    run = RunLog(log.parent)
    assert not run.update()
    first = run.steps[0]
    with log.open("a") as file:
        file.write(log_line("validation", 2, {"loss": 3.0}) + log_line("sample", 2, {"text": "å"}))
        file.write('{"kind": "step", "af')
    assert run.update()
    assert not run.update()  # the incomplete line
    os.truncate(log, log.stat().st_size - len('{"kind": "step", "af'))
    append(log, 3)
    assert run.update()
    assert run.steps[0] is first
    assert [line["after"] for line in run.steps] == [1, 2, 3]
    assert (run.validations[0]["loss"], run.samples[0]["text"]) == (3.0, "å")
    assert run.tokens == {1: 10, 2: 20, 3: 30}
    assert run.seconds == {1: 0.5, 2: 1.0, 3: 1.5}


@pytest.mark.parametrize("later", [2, 9])
def test_update_after_a_resume_drops_the_removed_lines(log: Path, later: int) -> None:
    append(log, 3, 4, 5)
    run = RunLog(log)
    truncate_log(log, 2)
    append(log, *range(3, 3 + later), seconds=0.25)  # shorter than before, or longer
    assert run.update()
    assert [line["after"] for line in run.steps] == list(range(1, 3 + later))
    assert run.seconds[3] == 1.25


def test_a_log_of_several_blocks_is_read_completely(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(log, *range(3, 10))
    monkeypatch.setattr(run_log, "BLOCK_BYTES", 150)  # a line has about 80
    run = RunLog(log)
    assert [line["after"] for line in run.steps] == list(range(1, 10))
    with log.open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(DataError, match="log.jsonl:10 is not JSON"):
        run.update()


def test_invalid_line_is_reported_with_its_number(log: Path) -> None:
    run = RunLog(log)
    with log.open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(DataError, match="log.jsonl:3 is not JSON"):
        run.update()


def test_smoothing_keeps_gaps_and_does_not_shift_a_line() -> None:
    line = [float(value) for value in range(20)]
    assert smooth(line, 5)[:-2] == pytest.approx(line[:-2])
    assert smooth([5.0, 5.0, None, 5.0], 3) == pytest.approx([5.0, 5.0, math.nan, 5.0], nan_ok=True)
    assert smooth([4.0, 1.0, 2.5], 1) == pytest.approx([4.0, 1.0, 2.5])
    assert smooth([1.0, 4.0, 2.0, 8.0], 100) == pytest.approx([1.0, 7 / 3, 15 / 4, 15 / 4])
