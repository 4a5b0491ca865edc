"""A progress line: live on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

__all__ = ["ProgressLine"]

PLAIN_SECONDS = 10.0
"""How often a line is printed where there is no terminal."""
MOST_SECONDS = 10**9
"""The longest time left that is shown."""


class ProgressLine:
    """A `whimbrel.base.progress.Progress` for people: done, total, rate, time left; a total with `~` is an estimate."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live: Progress | None = None
        self._total: int | None = None
        self._expected: int | None = None
        self._unit = ""
        self._done = self._before = 0
        self._begun = self._printed = time.monotonic()

    def start(self, total: int | None, unit: str, done: int = 0) -> None:
        """Begin a job of `total` units, of which earlier runs did `done`: these do not count in the rate."""
        self._total, self._expected, self._unit, self._done, self._before = total, None, unit, done, done
        self._begun = self._printed = time.monotonic()
        if self._console.is_terminal:
            columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"))
            self._live = Progress(*columns, console=self._console, transient=True)
            self._live.add_task(self._line(), total=total, completed=done)
            self._live.start()

    def expect(self, total: int) -> None:
        """Say about how many units it will be; shown with the next step."""
        self._expected = total

    def advance(self, count: int) -> None:
        """Say that `count` more units are done."""
        self._done += count
        if self._live is not None:
            total = self._expected if self._total is None else self._total
            self._live.update(self._live.task_ids[0], total=total, completed=self._done, description=self._line())
        elif time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._printed = time.monotonic()
            self._print()

    def finish(self) -> None:
        """End the job with a line that stays."""
        self.close()
        self._expected = None
        self._print()

    def close(self) -> None:
        """Take the live line down."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        rate = (self._done - self._before) / seconds
        total, mark = (self._expected, "~") if self._total is None else (self._total, "")
        amount = f"{self._done:,}" + ("" if total is None else f"/{mark}{total:,}")
        left = ""
        if total is not None and rate > 0 and self._done < total:
            left = f", {timedelta(seconds=min(round((total - self._done) / rate), MOST_SECONDS))} left"
        return f"{amount} {self._unit} in {seconds:.1f}s, {rate:,.0f} {self._unit}/s{left}"

    def _print(self) -> None:
        print(self._line(), file=sys.stderr, flush=True)
