"""A progress line: live on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

__all__ = ["ProgressLine"]

PLAIN_SECONDS = 10.0
"""How often a line is printed where there is no terminal."""


class ProgressLine:
    """A `whimbrel.base.progress.Progress` for people: done, total, rate, time left; also without a known total."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live: Progress | None = None
        self._total: int | None = None
        self._unit = ""
        self._done = 0
        self._begun = self._printed = time.monotonic()

    def start(self, total: int | None, unit: str) -> None:
        """Begin a job of `total` units."""
        self._total, self._unit, self._done = total, unit, 0
        self._begun = self._printed = time.monotonic()
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                _Rate(unit),
                TimeRemainingColumn(),
            )
            self._live = Progress(*columns, console=self._console)
            self._live.add_task(self._amount(), total=total)
            self._live.start()

    def advance(self, count: int) -> None:
        """Say that `count` more units are done."""
        self._done += count
        if self._live is not None:
            self._live.update(self._live.task_ids[0], advance=count, description=self._amount())
        elif time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._printed = time.monotonic()
            self._print()

    def finish(self) -> None:
        """End the job with a line that stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print()

    def _amount(self) -> str:
        return f"{self._done:,}" + (f"/{self._total:,}" if self._total is not None else "") + f" {self._unit}"

    def _print(self) -> None:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        rate = self._done / seconds
        left = (
            f", {(self._total - self._done) / rate:.0f}s left"
            if self._total and rate and self._done < self._total
            else ""
        )
        print(f"{self._amount()} in {seconds:.1f}s, {rate:,.0f} {self._unit}/s{left}", file=sys.stderr, flush=True)


class _Rate(ProgressColumn):
    """Units a second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        """The rate, or a dash before there is one."""
        return Text(f"{task.speed:,.0f} {self._unit}/s" if task.speed else "-")
