"""The progress line: what it says while a job runs, when it is done, and when it fails."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from whimbrel.cli import progress
from whimbrel.cli.progress import ProgressLine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as its last element."""
    times = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[-1])
    return times


def test_an_estimate_gives_the_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine()
    line.start(None, "tokens")
    clock.append(clock[-1] + 10)
    line.expect(100_000)
    line.advance(2000)
    assert capsys.readouterr().err == "2,000/~100,000 tokens in 10.0s, 200 tokens/s, 0:08:10 left\n"
    line.finish()
    assert capsys.readouterr().err == "2,000 tokens in 10.0s, 200 tokens/s\n"


def test_earlier_runs_count_in_the_amount_but_not_in_the_rate(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ProgressLine()
    line.start(10_000, "tokens", 9000)
    clock.append(clock[-1] + 10)
    line.advance(500)
    assert capsys.readouterr().err == "9,500/10,000 tokens in 10.0s, 50 tokens/s, 0:00:10 left\n"


def test_what_is_closed_without_being_done_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine()
    line.start(10, "tokens")
    line.advance(5)
    line.close()
    assert capsys.readouterr().err == ""


def test_the_live_line_is_taken_down(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    line = ProgressLine()
    line._console = Console(file=screen, force_terminal=True, width=200)
    line.start(None, "tokens", 3000)
    live = line._live
    assert live is not None
    clock.append(clock[-1] + 10)
    line.expect(7000)
    line.advance(1000)
    (task,) = live.tasks
    assert (task.completed, task.total) == (4000, 7000)
    assert task.description == "4,000/~7,000 tokens in 10.0s, 100 tokens/s, 0:00:30 left"
    line.close()
    assert not live.live.is_started
    line.close()
    assert capsys.readouterr().err == ""
