"""What the server counts, as Prometheus reads it. Each app has a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whimbrel.serve.worker import Worker

__all__ = ["CONTENT_TYPE", "Meter", "Metrics"]

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
            yield GaugeMetricFamily(f"whimbrel_engine_{name}", words, getattr(stats, name))
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


class Meter:
    """ASGI middleware that counts requests and how long they took."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request through and note what came of it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun = time.perf_counter()
        status: int | None = None
        first: float | None = None

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
            self.metrics.count(scope["path"], status, first, time.perf_counter() - begun)
