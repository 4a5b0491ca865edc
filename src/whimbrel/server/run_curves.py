"""The curves of a run for the page of `whimbrel watch`: smoothed, downsampled, and updated as the log grows."""

from __future__ import annotations

import itertools
import math
import time
from array import array
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whimbrel.train.run_directory import as_number
from whimbrel.train.run_log import LogReader, smooth

__all__ = ["MAX_POINTS", "MAX_SAMPLES", "RunCurves", "speed"]

MAX_POINTS = 1000
"""Maximum number of points per curve; longer ones are downsampled."""
MAX_SAMPLES = 20
DIGITS = 6
"""Significant digits of the numbers in a curve."""
PAUSE = 20
"""Minimum time between two updates of the curves, relative to the CPU time of one."""
POLL_SECONDS = 1.0
"""How often the page polls: an update that takes less than POLL_SECONDS / PAUSE does not delay the next one."""
AXES = ("step", "tokens", "seconds")
UNSMOOTHED = ("loss", "lr", "grad_norm", "peak_memory", "rewards/margins", "rewards/accuracies")

Columns = dict[str, "array[float]"]
Arrays = dict[str, NDArray[np.float64]]


class RunCurves(LogReader):
    """The curves of a run.

    A log may have millions of steps, so its lines are not kept, only the columns that are drawn.
    """

    def __init__(self, run: Path) -> None:
        """Raises DataError if the log does not exist. It is read by `get`."""
        super().__init__(run)
        self.requested = 0.0
        """When the curves were last requested, in seconds of `time.monotonic`."""
        self._next_update = 0.0
        self._version = 0
        self._smoothing = 0.0
        self._curves: dict[str, Any] | None = None

    def clear(self) -> None:
        self._steps: Columns = {name: array("d") for name in (*AXES, *UNSMOOTHED, "tokens_per_second")}
        self._validations: Columns = {name: array("d") for name in (*AXES, "loss")}
        self._resumes: Columns = {name: array("d") for name in AXES}
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._tokens, self._seconds = 0.0, 0.0

    def add(self, record: dict[str, Any]) -> None:
        step, kind = record["after"], record["kind"]
        if kind == "step":
            if record.get("resumed"):
                _append(self._resumes, {"step": step - 1, "tokens": self._tokens, "seconds": self._seconds})
            self._tokens += record["tokens"]
            self._seconds += record.get("seconds") or 0.0
        axes = {"step": step, "tokens": self._tokens, "seconds": self._seconds}
        if kind == "step":
            _append(self._steps, {**record, **axes, "tokens_per_second": speed(record)})
        elif kind == "validation":
            _append(self._validations, {**record, **axes})
        elif kind == "sample":
            self._samples.append({"step": step, "text": record["text"]})

    def get(self, smoothing: float, *, since: int, version: int) -> dict[str, Any] | None:
        """The curves, or None if they have not changed after version `since`; changes found now get `version`.

        Losses and speed are smoothed over `smoothing` percent of the steps. Raises DataError if the log is invalid.
        """
        self.requested = time.monotonic()
        if self.requested >= self._next_update and self.update():
            self._version, self._curves = version, None
        if self._version <= since:
            return None
        if self._curves is None or smoothing != self._smoothing:
            start = time.thread_time()
            self._curves, self._smoothing = self._compute(smoothing), smoothing
            self._next_update = self.requested + PAUSE * (time.thread_time() - start) - POLL_SECONDS
        return self._curves

    def _compute(self, smoothing: float) -> dict[str, Any]:
        steps, validations = _arrays(self._steps), _arrays(self._validations)
        loss = steps["loss"]
        span = max(1, round(len(loss) * smoothing / 100))
        smoothed = smooth(loss, span)
        kept = _select_steps(loss, smoothed)
        columns = {name: steps[name] for name in UNSMOOTHED}
        columns |= {"smoothed": smoothed, "tokens_per_second": smooth(steps["tokens_per_second"], span)}
        return {
            "span": span,
            **_axes({name: steps[name][kept] for name in AXES}),
            **{name: _to_list(column[kept]) for name, column in columns.items()},
            "validation": {**_axes(validations), "loss": _to_list(validations["loss"])},
            "resumes": _axes(_arrays(self._resumes)),
            "samples": list(reversed(self._samples)),
        }


def speed(record: Mapping[str, Any]) -> float | None:
    """Tokens per second of a step; None if its log line does not have the time."""
    return record["tokens"] / record["seconds"] if record.get("seconds") else None


def _append(columns: Columns, values: Mapping[str, Any]) -> None:
    for name, column in columns.items():
        value = as_number(values.get(name))
        column.append(math.nan if value is None else value)


def _arrays(columns: Columns) -> Arrays:
    """The columns without copying; they cannot grow as long as these arrays exist."""
    return {name: np.asarray(column) for name, column in columns.items()}


def _select_steps(loss: NDArray[np.float64], smoothed: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of at most MAX_POINTS steps: of each group, the one farthest from the smoothed curve, to keep spikes."""
    count = len(loss)
    if count <= MAX_POINTS:
        return np.arange(count)
    distance = np.abs(loss - smoothed)
    distance[np.isnan(distance)] = np.inf
    bounds = [count * group // MAX_POINTS for group in range(MAX_POINTS + 1)]
    kept = [low + int(distance[low:high].argmax()) for low, high in itertools.pairwise(bounds)]
    return np.array([*kept[:-1], count - 1])


def _axes(arrays: Arrays) -> dict[str, list[float]]:
    """The x-axis values: steps, tokens and seconds of training."""
    return {name: arrays[name].round(3).tolist() for name in AXES}


def _to_list(values: NDArray[np.float64]) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]
