"""ASGI middleware around the routes, in the order a request passes through it.

1. `MetricsMiddleware`: Prometheus metrics and the access log.
2. `AccessMiddleware`: host name, API key, shutdown. Rejects a request before any of its body is read.
3. `BodyMiddleware`: limits the number of requests, reads the body within size and time limits, and cancels the work of
   a client that disconnects.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whimbrel.server.config import ServeConfig, is_loopback
from whimbrel.server.errors import ApiError

if TYPE_CHECKING:
    from whimbrel.server.worker import Worker

__all__ = [
    "AccessMiddleware",
    "BodyMiddleware",
    "Metrics",
    "MetricsMiddleware",
    "RequestLog",
    "RequestTracker",
    "check_json_structure",
    "is_authorized",
    "on_request_end",
    "request_log",
]

DISCARD_SECONDS = 1.0
"""How long the rest of a rejected body is read and discarded. Closing the connection while the client is still sending
would reset it, and the client would never see the error."""

MAX_STRINGS = 65_536
"""Maximum number of strings in a body, including keys: 4096 messages with two parts each have fewer."""

MAX_CONTAINERS = 32_768
"""Maximum number of lists and objects in a body."""

MAX_VALUES = 1024**2
"""Maximum number of values in a body: about 4 MiB of token ids."""

MAX_DEPTH = 32
"""Maximum nesting depth. Python's own limit depends on the current stack depth."""

MAX_LOGGED_PATH = 200
"""Maximum number of characters of a path in the access log."""

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
ENGINE_COUNTERS = {
    "preemptions": "Sequences that were preempted and recomputed",
    "prompt_tokens": "Prompt tokens of accepted requests",
    "prefix_hits": "Tokens found in the prefix cache",
    "new_tokens": "Generated tokens",
}
ENGINE_GAUGES = {
    "running": ("engine_running", "Running sequences"),
    "waiting": ("engine_waiting", "Waiting sequences"),
    "blocks": ("kv_cache_blocks", "KV-cache blocks"),
    "free_blocks": ("kv_cache_free_blocks", "Free KV-cache blocks"),
}
"""Metric name and description of each gauge of the engine's statistics."""

# Keys of the ASGI scope of a request.
_LOG_KEY = "whimbrel.log"
_CLEANUP_KEY = "whimbrel.cleanup"


class RequestTracker:
    """Counts active requests and tracks whether the server is shutting down. Use from the event loop only."""

    def __init__(self) -> None:
        self.active = 0
        """Requests that are being read, processed or answered."""
        self.draining = False
        """Whether the server is shutting down: active requests finish, new ones get a 503."""
        self._body_timeouts: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count a request as active."""
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    @asynccontextmanager
    async def body_timeout(self, seconds: float) -> AsyncIterator[None]:
        """Time limit for reading a body; raises TimeoutError when it expires or the server shuts down."""
        async with asyncio.timeout(0 if self.draining else seconds) as timeout:
            self._body_timeouts.add(timeout)
            try:
                yield
            finally:
                self._body_timeouts.discard(timeout)

    def drain(self) -> None:
        """Let running requests finish; requests whose body has not arrived are dropped."""
        self.draining = True
        for timeout in self._body_timeouts:
            timeout.reschedule(0)

    async def wait_idle(self) -> None:
        """Wait until no request is active."""
        await self._idle.wait()


class Metrics(Collector):
    """Prometheus metrics of one app, in a separate registry."""

    def __init__(self, worker: Worker, routes: Iterable[str]) -> None:
        """Requests to paths other than `routes` are counted as `other`, to bound the number of labels."""
        self._worker, self._routes = worker, frozenset(routes)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._requests = Counter("whimbrel_requests", "Requests", ["route", "status"], registry=self.registry)
        self._first_byte = Histogram(
            "whimbrel_first_byte_seconds",
            "Time to the first byte of the response",
            ["route"],
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._duration = Histogram(
            "whimbrel_request_seconds",
            "Time to the end of the response",
            ["route"],
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )

    def collect(self) -> Iterable[Metric]:
        """Called by Prometheus' registry: the engine's metrics at scrape time."""
        stats = self._worker.stats
        for name, description in ENGINE_COUNTERS.items():
            yield CounterMetricFamily(f"whimbrel_engine_{name}", description, getattr(stats, name))
        for field, (name, description) in ENGINE_GAUGES.items():
            yield GaugeMetricFamily(f"whimbrel_{name}", description, getattr(stats, field))
        healthy = int(self._worker.healthy)
        yield GaugeMetricFamily("whimbrel_engine_healthy", "1 if the engine can serve requests, else 0", healthy)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def record(self, path: str, status: int | None, first_byte: float | None, duration: float) -> None:
        """Record one request; `status` is None if the client disconnected before the response."""
        route = path if path in self._routes else "other"
        self._requests.labels(route, "disconnected" if status is None else status).inc()
        if first_byte is not None:
            self._first_byte.labels(route).observe(first_byte)
        self._duration.labels(route).observe(duration)


@dataclass(slots=True)
class RequestLog:
    """What a route adds to the access log line of its request."""

    user: str | None = None
    usage: Callable[[], dict[str, int]] | None = None
    """Called when the request ends; returns its token counts."""


def request_log(scope: Scope) -> RequestLog:
    """The log entry of a request; a dummy if the app runs without `MetricsMiddleware`."""
    entry = scope.get(_LOG_KEY)
    return entry if isinstance(entry, RequestLog) else RequestLog()


class MetricsMiddleware:
    """Measures and logs every request."""

    def __init__(self, app: ASGIApp, metrics: Metrics, debug_paths: Collection[str]) -> None:
        """Successful requests to `debug_paths` are logged at level DEBUG, all others at INFO."""
        self.app, self.metrics, self.debug_paths = app, metrics, frozenset(debug_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; record and log the request when it ends."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start = time.perf_counter()
        status: int | None = None
        first_byte: float | None = None
        entry = scope[_LOG_KEY] = RequestLog()

        async def measured_send(message: Message) -> None:
            nonlocal status, first_byte
            if message["type"] == "http.response.start":
                status, first_byte = message["status"], time.perf_counter() - start
            await send(message)

        try:
            await self.app(scope, receive, measured_send)
        except Exception:
            status = status or 500
            raise
        finally:
            duration = time.perf_counter() - start
            self.metrics.record(scope["path"], status, first_byte, duration)
            is_routine = scope["path"] in self.debug_paths and status is not None and status < 400
            _log_request(logging.DEBUG if is_routine else logging.INFO, scope, status, duration, entry)


def _log_request(level: int, scope: Scope, status: int | None, seconds: float, entry: RequestLog) -> None:
    """Log one line per request; the path is percent-encoded, so that clients cannot inject log lines."""
    client = scope.get("client")
    usage = {} if entry.usage is None else entry.usage()
    fields = [f"{name}={usage[name]}" for name in ("prompt_tokens", "completion_tokens") if name in usage]
    if entry.user is not None:
        fields.append(f"user={entry.user!r}")
    logging.getLogger(__name__).log(
        level,
        "%s %s %s %s %.1f ms%s",
        client[0] if client else "-",
        scope["method"],
        quote(scope["path"], safe="/:@!$&'()*+,;=~")[:MAX_LOGGED_PATH],
        "disconnected" if status is None else status,
        seconds * 1000,
        "".join(f" {field}" for field in fields),
    )


def is_authorized(scope: Scope, api_key: str | None) -> bool:
    """Whether a request has the key, or needs none."""
    if api_key is None:
        return True
    scheme, key = _bearer_key(scope)
    # Digests have equal lengths, so that the time of the comparison reveals nothing about the key.
    same = hmac.compare_digest(_digest(key.encode("latin-1")), _digest(api_key.encode()))
    return scheme.lower() == "bearer" and same


def _bearer_key(scope: Scope) -> tuple[str, str]:
    """The scheme and the key of the `Authorization` header."""
    scheme, _, key = (_header(scope, b"authorization") or "").partition(" ")
    return scheme, key.strip()


class AccessMiddleware:
    """Checks the host name and the API key before any of the body is read."""

    def __init__(
        self, app: ASGIApp, config: ServeConfig, requests: RequestTracker, public_paths: Collection[str]
    ) -> None:
        """`public_paths` can be read without a key."""
        self.app, self.requests, self.public_paths = app, requests, frozenset(public_paths)
        self.api_key = config.api_key
        self.on_loopback = is_loopback(config.host)
        self.allowed_hosts = frozenset(name.lower() for name in config.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app, or respond with an error."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            self._check_host(scope)
            self._check_key(scope)
            if self.requests.draining and scope["method"] == "POST":
                raise _shutting_down()
        except ApiError as error:
            return await _reject(error, scope, receive, send)
        return await self.app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Prevent DNS rebinding: another site can make its own name resolve to this machine, but not change `Host`."""
        if "*" in self.allowed_hosts or not (self.on_loopback or self.allowed_hosts):
            return
        host = _header(scope, b"host") or ""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if name in self.allowed_hosts or (self.on_loopback and is_loopback(name)):
            return
        raise ApiError(421, f"unknown host name {host!r}: allow it with --allow-host", code="unknown_host")

    def _check_key(self, scope: Scope) -> None:
        if scope["path"] in self.public_paths and scope["method"] in {"GET", "HEAD"}:
            return
        if is_authorized(scope, self.api_key):
            return
        problem = "wrong API key" if _bearer_key(scope)[1] else "missing API key"
        raise ApiError(
            401,
            f"{problem}: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


class BodyMiddleware:
    """Limits the number of active requests, reads bodies, and cancels the work of clients that disconnect."""

    def __init__(self, app: ASGIApp, config: ServeConfig, requests: RequestTracker, paths: Collection[str]) -> None:
        """`paths` are the routes that read a request body."""
        self.app, self.config, self.requests, self.paths = app, config, requests, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and run the app on it, or respond with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["method"] != "POST" or scope["path"] not in self.paths:
            await self._run_without_body(scope, receive, send)
        elif self.requests.active >= self.config.max_requests:
            busy = ApiError(
                429,
                f"the server is at its limit of {self.config.max_requests} requests: try again later",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
            await _reject(busy, scope, receive, send)
        else:
            with ExitStack() as cleanup:
                cleanup.enter_context(self.requests.track())
                try:
                    body = await self._read_body(scope, receive)
                except ApiError as error:
                    return await _reject(error, scope, receive, send)
                if body is None:
                    return None
                try:
                    check_json_structure(body)
                except ApiError as error:
                    return await error.response()(scope, receive, send)
                await self._run_app(scope, body, receive, send, cleanup)
        return None

    async def _run_without_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app on a request whose body it does not read; close the connection if it does not end in time."""
        if not _has_body(scope):
            return await self.app(scope, receive, send)
        complete = not _header(scope, b"expect") and await _discard_body(receive)

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and not complete:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        return await self.app(scope, receive, send_and_close)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The complete body, or None if the client disconnected before its end."""
        content_type = (_header(scope, b"content-type") or "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            got = repr(content_type) if content_type else "none"
            raise ApiError(415, f"expected Content-Type application/json, got {got}", code="unsupported_media_type")
        content_length = _header(scope, b"content-length") or ""
        if content_length.isdecimal() and int(content_length) > self.config.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with self.requests.body_timeout(self.config.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self.config.max_body_bytes:
                        raise self._too_large()
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            if self.requests.draining:
                raise _shutting_down() from None
            seconds = self.config.body_seconds
            raise ApiError(408, f"the body did not arrive within {seconds:g} s", code="body_timeout") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.config.max_body_bytes} bytes", code="too_large")

    async def _run_app(self, scope: Scope, body: bytes, receive: Receive, send: Send, cleanup: ExitStack) -> None:
        """Run the app on a body; cancel it when the client disconnects or stops reading.

        Two tasks run at the same time: the app, and one that waits for the client to disconnect.
        """
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        response_sent = asyncio.Event()

        async def receive_body() -> Message:
            if not messages:
                await asyncio.Event().wait()  # wait forever: a disconnect cancels the app
            return messages.pop()

        async def send_with_timeout(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                response_sent.set()
                cleanup.close()  # before the client can read the end of the response and send another request
            try:
                async with asyncio.timeout(self.config.stall_seconds):
                    await send(message)
            except TimeoutError:
                logging.getLogger(__name__).info("a client stopped reading its response: request cancelled")
                raise asyncio.CancelledError from None

        app = asyncio.ensure_future(self.app({**scope, _CLEANUP_KEY: cleanup}, receive_body, send_with_timeout))
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({app, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not app.done() and not response_sent.is_set():
                app.cancel()
            await asyncio.wait({app})
        finally:
            app.cancel()
            disconnect.cancel()
        if not app.cancelled() and (error := app.exception()) is not None:
            raise error


def on_request_end(scope: Scope, callback: Callable[[], object]) -> None:
    """Call `callback` when the request ends, whether it succeeds, fails or is cancelled."""
    scope[_CLEANUP_KEY].callback(callback)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def check_json_structure(body: bytes) -> None:
    """Reject a body that is too expensive to parse, before parsing it: that would block the event loop.

    Makes a few passes over the bytes without a Python loop per value.
    """
    if b"\0" in body:
        raise ApiError(400, "expected JSON in UTF-8: the body contains a zero byte", code="invalid_json")
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in body else body
    if unescaped.count(b'"') > 2 * MAX_STRINGS:
        raise _too_many(f"{MAX_STRINGS} strings")
    # Counts brackets and commas in strings too: if there are few, the rest need not be checked.
    if unescaped.count(b"[") + unescaped.count(b"{") <= MAX_DEPTH and unescaped.count(b",") < MAX_VALUES:
        return
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    if outside_strings.count(b",") >= MAX_VALUES:
        raise _too_many(f"{MAX_VALUES} values")
    if outside_strings.count(b"[") + outside_strings.count(b"{") > MAX_CONTAINERS:
        raise _too_many(f"{MAX_CONTAINERS} lists and objects")
    depth = 0
    for bracket in re.findall(rb"[\[\]{}]", outside_strings):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise _too_many(f"{MAX_DEPTH} levels of lists and objects")


def _too_many(limit: str) -> ApiError:
    return ApiError(400, f"the body has more than {limit}: send less in one request", code="invalid_value")


def _shutting_down() -> ApiError:
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError(503, "the server is shutting down: try again later", code="draining", headers=headers)


async def _reject(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with `error`, after reading the rest of the body for up to `DISCARD_SECONDS`."""
    # A client that waits for 100-continue sends no body after an error response.
    if _has_body(scope) and not _header(scope, b"expect") and not await _discard_body(receive):
        error.headers["Connection"] = "close"
    await error.response()(scope, receive, send)


async def _discard_body(receive: Receive) -> bool:
    """Read the rest of a body for at most `DISCARD_SECONDS`; True if it ended or the client disconnected."""
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while (await receive()).get("more_body"):
                pass
    except TimeoutError:
        return False
    return True


def _has_body(scope: Scope) -> bool:
    return any(
        key == b"transfer-encoding" or (key == b"content-length" and value.strip(b"0 "))
        for key, value in scope["headers"]
    )


def _header(scope: Scope, name: bytes) -> str | None:
    """The value of a header; None if it is missing or repeated."""
    values = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
