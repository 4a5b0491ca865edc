"""What `whimbrel runs`, `compare`, `plot` and `watch` read of a run: its state and its log. Does not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whimbrel.base.errors import DataError
from whimbrel.train.control import query_status
from whimbrel.train.run_directory import LOG_FILE, last_line, log_path, parse_log

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["LogReader", "RunInfo", "RunLog", "find_runs", "inspect_run", "smooth"]

LOG_PATTERNS = (LOG_FILE, f"*/{LOG_FILE}", f"*/*/{LOG_FILE}")
"""Where to look for runs: the directory itself and two levels below."""
BLOCK_BYTES = 1 << 18
"""How much of a log is parsed at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The state of a run."""

    run: Path
    state: str
    """running, finished, stopped, dead, other host or other user."""
    last: dict[str, Any]
    """The last step in its log; empty before the first one."""
    validation: dict[str, Any]
    """The last validation in its log; empty before the first one."""
    modified: float
    """When its log was last written, as a Unix time."""
    live: dict[str, Any] | None
    """The status it reports while it is running."""

    @property
    def step(self) -> int:
        return int(self.last.get("after", 0))

    @property
    def total(self) -> int | None:
        return self.last.get("total")


def find_runs(directories: Iterable[Path]) -> list[Path]:
    """The runs among these directories and up to two levels below, sorted; raises DataError if one does not exist."""
    found = set()
    for directory in directories:
        if not directory.is_dir():
            raise DataError(f"no such directory: {directory}; pass the directories that contain your runs")
        found |= {log.parent for pattern in LOG_PATTERNS for log in directory.glob(pattern)}
    return sorted(found)


def inspect_run(run: Path) -> RunInfo:
    """The state of a run, from the end of its log and, if it is running, from its control server."""
    log = run / LOG_FILE
    last, validation = last_line(log, "step"), last_line(log, "validation")
    state, live = query_status(run)
    name = state.replace("-", " ")
    if state == "ended":
        name = "finished" if last and last["after"] == last.get("total") else "stopped"
    return RunInfo(
        run=run, state=name, last=last or {}, validation=validation or {}, live=live, modified=log.stat().st_mtime
    )


class LogReader(ABC):
    """Reads a log while it is written: `update` passes each new line to `add`."""

    def __init__(self, run: Path) -> None:
        """`run` is its directory or the log itself; raises DataError if it does not exist. Does not read it yet."""
        self.path = log_path(run)
        self._restart()

    def _restart(self) -> None:
        self._size = self._count = 0
        self._last_line = b""
        self.clear()

    @abstractmethod
    def clear(self) -> None:
        """Forget all lines."""

    @abstractmethod
    def add(self, record: dict[str, Any]) -> None:
        """Add a line."""

    def update(self) -> bool:
        """Read new lines, or everything if a resumed run has removed lines; returns whether there is anything new.

        Raises DataError if a line is invalid; the lines before it need not be read again.
        """
        with self.path.open("rb") as file:
            file.seek(self._size - len(self._last_line))
            changed = file.read(len(self._last_line)) != self._last_line
            if changed:
                self._restart()
            while True:
                file.seek(self._size)  # an incomplete line is read again
                lines = [line for line in file.readlines(BLOCK_BYTES) if line.endswith(b"\n")]
                if not lines:
                    return changed
                for record in parse_log(self.path, b"".join(lines), self._count + 1):
                    self.add(record)
                self._size += sum(map(len, lines))
                self._count += len(lines)
                self._last_line, changed = lines[-1], True


class RunLog(LogReader):
    """The log of a run by kind of line."""

    def __init__(self, run: Path) -> None:
        """Raises DataError if the log does not exist or is invalid."""
        super().__init__(run)
        self.update()

    def clear(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.tokens: dict[int, int] = {}
        """Tokens by completed steps, counted from the start of the log; a run resumed in another directory has no
        earlier steps."""
        self.seconds: dict[int, float] = {}
        """Time spent in training steps, by completed steps."""
        self._total_tokens, self._total_seconds = 0, 0.0

    @property
    def name(self) -> str:
        """The name of the run directory, or of a log outside one."""
        return self.path.resolve().parent.name if self.path.name == LOG_FILE else self.path.stem

    @property
    def start(self) -> int:
        """Number of steps before the first one in the log."""
        return int(self.steps[0]["after"]) - 1

    def add(self, record: dict[str, Any]) -> None:
        after, kind = int(record["after"]), record["kind"]
        if kind == "step":
            self._total_tokens += record["tokens"]
            self._total_seconds += record.get("seconds") or 0.0
            self.steps.append(record)
        elif kind == "validation":
            self.validations.append(record)
        elif kind == "sample":
            self.samples.append(record)
        self.tokens[after], self.seconds[after] = self._total_tokens, self._total_seconds


def smooth(values: Sequence[float | None] | NDArray[np.float64], span: int) -> NDArray[np.float64]:
    """Moving average over about `span` values around each one; None and NaN become NaN and do not count.

    The window grows symmetrically at the start, so that a falling curve is not shifted, and is cut off at the end.
    """
    import numpy as np

    values = np.asarray(values, dtype=np.float64)
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(values))
    half = np.minimum(index, span // 2)
    low, high = index - half, np.minimum(index + half + 1, len(values))
    return np.where(known, (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1), np.nan)
