"""The web app of `whimbrel watch`: a page with the curves of runs, and the JSON endpoints behind it."""

from __future__ import annotations

import asyncio
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
from whimbrel.server.run_curves import RunCurves, speed
from whimbrel.server.static_files import add_static_files
from whimbrel.train.control import send_request
from whimbrel.train.run_log import RunInfo, find_runs, inspect_run

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
KEEP_SECONDS = 300.0
"""How long the curves of a run are kept after the last request for them."""


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
        self._curves: dict[str, RunCurves] = {}
        """The runs whose curves have been requested."""
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
            version, runs, curves = time.time_ns() // 1000, [], {}
            for run in find_runs(self._directories):
                name = str(run)
                try:
                    if name in requested:
                        if name not in self._curves:
                            self._curves[name] = RunCurves(run)
                        if curve := self._curves[name].get(smoothing, since=since, version=version):
                            curves[name] = curve
                    runs.append(_row(inspect_run(run)))
                except FileNotFoundError:  # the run has just been removed
                    continue
                except DataError as error:
                    runs.append({"name": name, "state": "unreadable", "error": str(error)})
            oldest = time.monotonic() - KEEP_SECONDS
            self._curves = {name: kept for name, kept in self._curves.items() if kept.requested >= oldest}
            return {"version": version, "runs": runs, "curves": curves}


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
        "tokens_per_second": live.get("tokens_per_second") or speed(last),
        "peak_memory": last.get("peak_memory"),
        "eta_seconds": live.get("eta_seconds"),
        "modified": info.modified,
    }
