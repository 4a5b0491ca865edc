"""Prometheus metrics and the access log. Each app has a registry of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whimbrel.server.worker import Worker

__all__ = ["CONTENT_TYPE", "Meter", "Metrics", "Record", "record_of"]

RECORD = "whimbrel.record"
MAX_LOGGED_PATH = 200
"""Maximum number of characters of a path in the access log."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
COUNTED = {
    "preemptions": "Texts that gave up their pages and were read anew",
    "prompt_tokens": "Tokens of prompts taken on",
    "prefix_hits": "Tokens of prompts that known pages held already",
    "new_tokens": "Tokens drawn",
}
MEASURED = {
    "running": "Texts under way",
    "waiting": "Texts that wait for their turn",
    "pages": "Pages of the cache",
    "free_pages": "Pages of the cache that are free",
}


class Metrics(Collector):
    """The counts of one app."""

    def __init__(self, worker: Worker, routes: Iterable[str]) -> None:
        self._worker, self._routes = worker, frozenset(routes)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._requests = Counter("whimbrel_requests", "Requests answered", ["route", "status"], registry=self.registry)
        self._first = Histogram(
            "whimbrel_first_byte_seconds", "Until an answer began", ["route"], buckets=SECONDS, registry=self.registry
        )
        self._whole = Histogram(
            "whimbrel_request_seconds", "Until an answer ended", ["route"], buckets=SECONDS, registry=self.registry
        )

    def collect(self) -> Iterable[Metric]:
        """What the engine counted."""
        stats = self._worker.stats
        for name, words in COUNTED.items():
            yield CounterMetricFamily(f"whimbrel_engine_{name}", words, getattr(stats, name))
        for name, words in MEASURED.items():
            yield GaugeMetricFamily(f"whimbrel_engine_{name}", words, getattr(stats, name.replace("pages", "blocks")))
        yield GaugeMetricFamily("whimbrel_engine_well", "1 while the engine's steps succeed", int(self._worker.well))

    def text(self) -> bytes:
        """All counts as they stand."""
        return generate_latest(self.registry)

    def count(self, path: str, status: int | None, first: float | None, whole: float) -> None:
        """Note one request; a client that left before it was answered has no status."""
        route = path if path in self._routes else "other"
        self._requests.labels(route, "left" if status is None else status).inc()
        if first is not None:
            self._first.labels(route).observe(first)
        self._whole.labels(route).observe(whole)


@dataclass(slots=True)
class Record:
    """What a route adds to the log line of its request."""

    user: str | None = None
    usage: Callable[[], dict[str, int]] | None = None
    """Counts tokens when the request ends."""


def record_of(scope: Scope) -> Record:
    """The record of a request; unused if the app runs without `Meter`."""
    found = scope.get(RECORD)
    return found if isinstance(found, Record) else Record()


class Meter:
    """ASGI middleware that counts, times and logs every request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request through; count and log it when it ends."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun = time.perf_counter()
        status: int | None = None
        first: float | None = None
        record = scope[RECORD] = Record()

        async def watch(message: Message) -> None:
            nonlocal status, first
            if message["type"] == "http.response.start":
                status, first = message["status"], time.perf_counter() - begun
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Exception:
            status = status or 500
            raise
        finally:
            took = time.perf_counter() - begun
            self.metrics.count(scope["path"], status, first, took)
            _log_request(scope, status, took, record)


def _log_request(scope: Scope, status: int | None, seconds: float, record: Record) -> None:
    """Log one line per request; the path is percent-encoded, so that clients cannot inject log lines."""
    client = scope.get("client")
    usage = {} if record.usage is None else record.usage()
    fields = [f"{name}={usage[name]}" for name in ("prompt_tokens", "completion_tokens") if name in usage]
    if record.user is not None:
        fields.append(f"user={record.user!r}")
    logging.getLogger(__name__).info(
        "%s %s %s %s %.1f ms%s",
        client[0] if client else "-",
        scope["method"],
        quote(scope["path"], safe="/:@!$&'()*+,;=~")[:MAX_LOGGED_PATH],
        "left" if status is None else status,
        seconds * 1000,
        "".join(f" {field}" for field in fields),
    )
