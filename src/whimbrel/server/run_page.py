"""The web app of `whimbrel watch`: a page with the curves of runs, and the JSON endpoints behind it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Response
from pydantic import BaseModel
from starlette.middleware.gzip import GZipMiddleware

from whimbrel import __version__
from whimbrel.base.errors import DataError
from whimbrel.server.config import ServeConfig
from whimbrel.server.errors import ApiError, add_error_handlers, json_response
from whimbrel.server.middleware import AccessMiddleware, BodyMiddleware, RequestTracker
from whimbrel.server.static_files import add_static_files
from whimbrel.train.control import send_request
from whimbrel.train.run_log import RunInfo, RunLog, find_runs, inspect_run, smooth

__all__ = ["RunPage"]

STATIC_FILES = {
    "/": "watch.html",
    "/page/client.js": "client.js",
    "/page/icon.svg": "icon.svg",
    "/page/theme.css": "theme.css",
    "/page/uplot.css": "uplot/uPlot.min.css",
    "/page/uplot.js": "uplot/uPlot.iife.min.js",
    "/page/watch.css": "watch.css",
    "/page/watch.js": "watch.js",
}
MAX_POINTS = 1000
"""Maximum number of points per curve; longer ones are downsampled."""
MAX_SAMPLES = 20
UNSMOOTHED = ("lr", "grad_norm", "peak_memory", "rewards/margins", "rewards/accuracies")
DIGITS = 6
"""Significant digits of the numbers in a curve."""


class ControlRequest(BaseModel):
    """Sent by the buttons of the page."""

    run: str
    action: Literal["save", "stop"]


class RunPage:
    """The web app that shows the runs in these directories."""

    def __init__(self, directories: Sequence[Path], config: ServeConfig) -> None:
        """Raises DataError if a directory does not exist."""
        self.config, self.requests = config, RequestTracker()
        self._directories = directories
        self._logs: dict[str, tuple[RunLog, int]] = {}
        """The logs that have been requested, and when each last changed."""
        self._lock = threading.Lock()
        find_runs(directories)
        self.app = FastAPI(title="Whimbrel runs", version=__version__, docs_url=None, redoc_url=None)
        add_error_handlers(self.app)
        add_static_files(self.app, STATIC_FILES)
        self.app.add_api_route("/api/runs", self.get_runs)
        self.app.add_api_route("/api/control", self.control, methods=["POST"])
        # The middleware added last runs first.
        self.app.add_middleware(GZipMiddleware)
        self.app.add_middleware(BodyMiddleware, config=config, requests=self.requests, paths=["/api/control"])
        self.app.add_middleware(AccessMiddleware, config=config, requests=self.requests, public_paths=STATIC_FILES)

    def stop(self) -> None:
        """Requests are short: nothing to stop."""

    async def get_runs(
        self,
        run: Annotated[list[str], Query()] = [],  # noqa: B006
        smoothing: Annotated[float, Query(ge=0, le=100)] = 2.0,
        since: int = 0,
    ) -> Response:
        """List all runs, with the curves of those requested by `run` that changed after version `since`."""
        return json_response(await asyncio.to_thread(self._read_runs, run, smoothing, since))

    async def control(self, body: ControlRequest) -> Response:
        """Make a run save or stop. This needs the token of the run, which only its owner can read."""
        found = {str(run): run for run in await asyncio.to_thread(find_runs, self._directories)}
        if body.run not in found:
            raise ApiError(404, f"unknown run {body.run!r}", param="run")
        reply = await asyncio.to_thread(send_request, found[body.run], body.action)
        return json_response({"step": reply["step"], "message": reply["message"]})

    def _read_runs(self, requested: Sequence[str], smoothing: float, since: int) -> dict[str, Any]:
        with self._lock:
            now, runs, curves = time.time_ns() // 1000, [], {}
            for run in find_runs(self._directories):
                name = str(run)
                try:
                    log, changed = self._read_log(run, now) if name in requested else (None, 0)
                    runs.append(_row(inspect_run(run)))
                    if log is not None and changed > since:
                        curves[name] = _curves(log, smoothing)
                except FileNotFoundError:  # the run has just been removed
                    continue
                except DataError as error:
                    runs.append({"name": name, "state": "unreadable", "error": str(error)})
            return {"version": now, "runs": runs, "curves": curves}

    def _read_log(self, run: Path, now: int) -> tuple[RunLog, int]:
        name = str(run)
        if name not in self._logs:
            self._logs[name] = (RunLog(run), now)
        else:
            log, changed = self._logs.pop(name)  # dropped if update() fails
            self._logs[name] = (log, now if log.update() else changed)
        return self._logs[name]


def _row(info: RunInfo) -> dict[str, Any]:
    """A row of the table of runs."""
    last, live = info.last, info.live or {}
    return {
        "name": str(info.run),
        "state": info.state,
        "step": info.step,
        "total": info.total,
        "loss": last.get("loss"),
        "validation": info.validation.get("loss"),
        "tokens_per_second": live.get("tokens_per_second") or _speed(last),
        "peak_memory": last.get("peak_memory"),
        "eta_seconds": live.get("eta_seconds"),
        "modified": info.modified,
    }


def _speed(line: dict[str, Any]) -> float | None:
    return line["tokens"] / line["seconds"] if line.get("seconds") else None


def _curves(log: RunLog, smoothing: float) -> dict[str, Any]:
    """The curves of a run; losses and speed are smoothed over `smoothing` percent of the steps."""
    steps, span = log.steps, max(1, round(len(log.steps) * smoothing / 100))
    loss = [line["loss"] for line in steps]
    smoothed = smooth(loss, span)
    columns = {
        "loss": loss,
        "smoothed": smoothed,
        "tokens_per_second": smooth([_speed(line) for line in steps], span),
        **{name: [line.get(name) for line in steps] for name in UNSMOOTHED},
    }
    kept = _select_steps(loss, smoothed)
    samples = [{"step": line["after"], "text": line["text"]} for line in log.samples[-MAX_SAMPLES:]]
    return {
        "span": span,
        **_axes(log, [steps[index]["after"] for index in kept]),
        **{name: [_round(column[index]) for index in kept] for name, column in columns.items()},
        "validation": {
            **_axes(log, [line["after"] for line in log.validations]),
            "loss": [_round(line["loss"]) for line in log.validations],
        },
        "resumes": _axes(log, [line["after"] - 1 for line in steps if line.get("resumed")]),
        "samples": samples[::-1],
    }


def _select_steps(loss: Sequence[float | None], smoothed: Sequence[float | None]) -> list[int]:
    """Indices of at most MAX_POINTS steps: of each group, the one farthest from the smoothed curve, to keep spikes."""
    count = len(loss)
    if count <= MAX_POINTS:
        return list(range(count))

    def distance(index: int) -> float:
        value, mean = loss[index], smoothed[index]
        return float("inf") if value is None or mean is None else abs(value - mean)

    bounds = [count * group // MAX_POINTS for group in range(MAX_POINTS + 1)]
    kept = [max(range(low, high), key=distance) for low, high in itertools.pairwise(bounds)]
    return [*kept[:-1], count - 1]


def _axes(log: RunLog, steps: Sequence[int]) -> dict[str, list[float]]:
    """The x-axis values: steps, tokens and seconds of training."""
    return {
        "step": list(steps),
        "tokens": [log.tokens.get(step, 0) for step in steps],
        "seconds": [round(log.seconds.get(step, 0.0), 3) for step in steps],
    }


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
