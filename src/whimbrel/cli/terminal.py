"""Terminal output: log messages, tables, progress bars, and text with escaped control characters."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = [
    "ProgressBar",
    "configure_logging",
    "escape_controls",
    "format_escapes",
    "parse_escapes",
    "print_table",
    "print_text",
    "warn_once",
]

ESCAPED = re.compile(r"\\([nrt\\]|x[0-9a-f]{2}|u[0-9a-f]{4})")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""All control characters except tab and newline, and bidirectional formatting characters."""

PIPE_WIDTH = 1000
"""Width of a table that is not printed to a terminal, so that no cell is wrapped."""
MIN_TEXT_WIDTH = 24
"""Columns with longer cells are not made narrower than this."""
LOG_INTERVAL = 10.0
"""Seconds between two progress lines without a terminal."""
MAX_SECONDS_LEFT = 10**9


class _StderrHandler(logging.Handler):
    """Writes each message as one line to the current `sys.stderr`, on ranks other than 0 with the rank."""

    def __init__(self) -> None:
        rank = os.environ.get("RANK", "0")
        super().__init__(logging.INFO if rank == "0" else logging.WARNING)
        self._prefix = "" if rank == "0" else f"[rank {rank}] "

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone, so the failure cannot be reported
            print(f"{self._prefix}{self.format(record)}", file=sys.stderr, flush=True)


def configure_logging() -> None:
    """Show Whimbrel's log messages of level INFO and above, unless a handler or level is already set.

    Of several processes, rank 0 shows them all, the others only warnings and errors.
    """
    logger = logging.getLogger("whimbrel")
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


@contextlib.contextmanager
def warn_once(name: str) -> Iterator[None]:
    """Within the block, show each message of the logger `name` once."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return message not in seen and not seen.add(message)  # type: ignore[func-returns-value]

    logger = logging.getLogger(name)
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def escape_controls(text: str) -> str:
    """Escape control characters (`\\x1b`), so that a terminal does not interpret them."""
    return CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def parse_escapes(text: str) -> str:
    """Replace `\\n`, `\\r`, `\\t`, `\\\\`, `\\x01` and `\\u2028` in an option value with the characters they encode."""
    return ESCAPED.sub(lambda match: ESCAPES.get(match[1]) or chr(int(match[1][1:], 16)), text)


def format_escapes(text: str) -> str:
    """The option value that `parse_escapes` turns into `text`."""
    return escape_controls(text.replace("\\", "\\\\").replace("\n", "\\n"))


def print_text(text: str, end: str = "") -> None:
    """Print generated text: unchanged to a file or pipe, with control characters escaped on a terminal."""
    print(escape_controls(text) if sys.stdout.isatty() else text, end=end, flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], optional: Sequence[str] = ()) -> None:
    """Print an aligned table; the header is left out if all column names are empty.

    If the terminal is too narrow for every word and for the first column, the `optional` columns are left out, in this
    order, as far as necessary; if that is not enough, each row is printed as a block, with one line per column.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH, highlight=False, markup=False, emoji=False)
    cells = [(name, *column) for name, *column in zip(columns, *rows, strict=True)]
    for left_out in range(len(optional) + 1):
        shown = [column for column in cells if column[0] not in optional[:left_out]]
        widths = _column_widths(shown, console.width)
        if widths is not None:
            break
    else:
        _print_blocks(console, cells)
        return
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for (name, *_), width in zip(shown, widths, strict=True):
        table.add_column(name, overflow="fold", width=width)
    for row in list(zip(*shown, strict=True))[1:]:
        table.add_row(*row)
    with console.capture() as capture:
        console.print(table)
    lines = capture.get().splitlines()
    print("\n".join(lines if console.is_terminal else map(str.rstrip, lines)))


def _column_widths(cells: Sequence[Sequence[str]], available: int) -> list[int] | None:
    """Widths of columns that fit without breaking a word or wrapping the first column; None if there are none."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in cells]
    longest_words = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in cells]
    shortest = [max(word, MIN_TEXT_WIDTH) if width > MIN_TEXT_WIDTH else word
                for word, width in zip(longest_words, widths, strict=True)]  # fmt: skip
    shortest[0] = widths[0]
    while sum(widths) + 2 * (len(widths) - 1) > available:
        slack = [width - least for width, least in zip(widths, shortest, strict=True)]
        if not any(slack):
            return None
        widths[slack.index(max(slack))] -= 1
    return widths


def _print_blocks(console: Console, cells: Sequence[Sequence[str]]) -> None:
    """Print each row as its first cell with the other cells below it, indented and with the names of their columns."""
    from rich.padding import Padding
    from rich.table import Table

    (_, *titles), *others = cells
    names = [column[0] for column in others]
    for title, *values in zip(titles, *(column[1:] for column in others), strict=True):
        console.print(title, soft_wrap=True, style="bold" if any(names) else None)
        block = Table(box=None, pad_edge=False, show_header=False)
        if any(names):
            block.add_column(no_wrap=True)
        block.add_column(overflow="fold")
        for name, value in zip(names, values, strict=True):
            block.add_row(*((name, value) if any(names) else (value,)))
        console.print(Padding(block, (0, 0, 0, 2)))


class ProgressBar:
    """Implements `whimbrel.base.progress.Progress`: a live bar on a terminal, otherwise a line every few seconds.

    A total with `~` is an estimate.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._live: Progress | None = None
        self._total: int | None = None
        self._estimate: int | None = None
        self._unit = ""
        self._done = self._resumed_at = 0
        self._start_time = self._last_print = time.monotonic()

    def start(self, total: int | None, unit: str, done: int = 0) -> None:
        """Start a job of `total` units; the `done` units of earlier runs are excluded from the rate."""
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._total, self._estimate, self._unit, self._done, self._resumed_at = total, None, unit, done, done
        self._start_time = self._last_print = time.monotonic()
        if self._console.is_terminal:
            columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"))
            self._live = Progress(*columns, console=self._console, transient=True)
            self._live.add_task(self._line(), total=total, completed=done)
            self._live.start()

    def expect(self, total: int) -> None:
        """Set an estimate of the total; shown with the next `advance`."""
        self._estimate = total

    def advance(self, count: int) -> None:
        """Count `count` more units as done."""
        self._done += count
        if self._live is not None:
            total = self._estimate if self._total is None else self._total
            self._live.update(self._live.task_ids[0], total=total, completed=self._done, description=self._line())
        elif time.monotonic() - self._last_print >= LOG_INTERVAL:
            self._last_print = time.monotonic()
            self._print()

    def finish(self) -> None:
        """Replace the bar with a final line."""
        self.close()
        self._estimate = None
        self._print()

    def close(self) -> None:
        """Remove the bar."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._start_time, 1e-9)
        rate = (self._done - self._resumed_at) / seconds
        total, mark = (self._estimate, "~") if self._total is None else (self._total, "")
        amount = f"{self._done:,}" + ("" if total is None else f"/{mark}{total:,}")
        remaining = ""
        if total is not None and rate > 0 and self._done < total:
            remaining = f", {timedelta(seconds=min(round((total - self._done) / rate), MAX_SECONDS_LEFT))} left"
        return f"{amount} {self._unit} in {seconds:.1f}s, {rate:,.0f} {self._unit}/s{remaining}"

    def _print(self) -> None:
        print(self._line(), file=sys.stderr, flush=True)
