"""The socket side of the server: listening, accepting connections, HTTP parsing limits, timeouts and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Collection
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from whimbrel.base.errors import ConfigError
from whimbrel.server.config import ServeConfig
from whimbrel.server.errors import ApiError
from whimbrel.server.middleware import RequestTracker

__all__ = ["Acceptor", "App", "Connection", "Server", "bind_socket", "connection_limit", "server_url"]

BACKLOG = 2048
SHUTDOWN_GRACE = 5
"""Seconds to finish sending responses after the engine has stopped."""

HEADER_SECONDS = 30.0
"""Time limit for the headers of a request: from the start of a connection, or from the first byte after a response."""

MAX_CHUNKS = 4096
"""Maximum number of chunks in a body. Each costs as much as a full read, so tiny chunks would starve other clients."""

RESERVED_FILES = 32
"""File descriptors reserved for everything except connections."""

RETRY_SECONDS = 0.1
LOG_INTERVAL = 10.0
"""Minimum number of seconds between two warnings about too many connections."""

OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_log = logging.getLogger(__name__)


def bind_socket(config: ServeConfig) -> socket.socket:
    """Bind a socket to the configured address; clients can connect once `Server.run_on` listens on it.

    Raises if the address is in use, so that this is reported before the model is loaded.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise _listen_error(config, error) from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # on Windows it would let two servers share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Inherited by connections. Without it, a response waits 40 ms for the client to acknowledge its headers.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _listen_error(config, error) from error
    return sock


def _listen_error(config: ServeConfig, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"cannot listen on {config.host} port {config.port}: {reason}; choose another --port or --host")


def server_url(sock: socket.socket) -> str:
    """The URL for a browser on this machine."""
    host, port = sock.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


class App(Protocol):
    """What a `Server` serves: the model API, or the runs page."""

    app: FastAPI
    config: ServeConfig
    requests: RequestTracker

    def stop(self) -> None:
        """Abort running requests."""


class Server(uvicorn.Server):
    """`uvicorn` with a graceful shutdown.

    On the first signal new requests get a 503 and running ones finish; a second signal, or the end of `drain_seconds`,
    stops them. The process exits with status 0 either way.
    """

    def __init__(self, service: App) -> None:
        super().__init__(
            uvicorn.Config(
                service.app,
                http=Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=SHUTDOWN_GRACE,
            )
        )
        self._service = service
        self._draining: asyncio.Task[None] | None = None
        self._on_ready: Callable[[], object] | None = None

    def run_on(self, sock: socket.socket, on_ready: Callable[[], object] | None = None) -> None:
        """Serve on a bound socket until shutdown; `on_ready` is called once connections are accepted."""
        self._on_ready = on_ready
        asyncio.run(self.serve(sockets=[sock]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, start the service and accept connections."""
        assert sockets is not None, "start the server with run_on"
        limit = connection_limit(self._service.config.max_connections)
        for sock in sockets:
            try:
                sock.listen(BACKLOG)
            except OSError as error:  # another process listened on the same address first
                raise _listen_error(self._service.config, error) from error
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the service failed to start: see the log")
        connections = self.server_state.connections
        make_connection = functools.partial(
            Connection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        self.servers = [Acceptor(sock, make_connection, connections, limit) for sock in sockets]  # type: ignore[arg-type, misc]
        self.started = True
        if self._on_ready is not None:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler; runs in the thread of the event loop."""
        asyncio.get_running_loop().call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Start draining; a second call stops immediately."""
        if self._draining is None:
            self._service.requests.drain()
            self._draining = asyncio.create_task(self._drain())
        else:
            self._stop_now()

    async def _drain(self) -> None:
        requests = self._service.requests
        count = f"{requests.active} request{'s' * (requests.active != 1)}"
        waiting = f": waiting for {count}; a second signal stops them" if requests.active else ""
        _log.info("shutting down%s", waiting)
        try:
            async with asyncio.timeout(self._service.config.drain_seconds):
                await requests.wait_idle()
        except TimeoutError:
            _log.warning("requests that did not finish in time: %d", requests.active)
        self._stop_now()

    def _stop_now(self) -> None:
        self._service.stop()
        self.should_exit = True


class _Parser(h11.Connection):
    """`h11` that rejects ambiguous and disproportionately expensive requests."""

    error: ApiError | None = None
    """Why the last request was rejected; None if it is not valid HTTP."""
    _chunks = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                # Request smuggling: a proxy may use the other length and parse the rest of the body as a request.
                self._reject(400, "send either Content-Length or Transfer-Encoding (HTTP/1.1), not both")
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            if self._chunks > MAX_CHUNKS:
                self._reject(413, f"the body has more than {MAX_CHUNKS} chunks: send larger ones")
        return event

    def _reject(self, status: int, message: str) -> NoReturn:
        self.error = ApiError(status, message, code="invalid_http" if status == 400 else "too_large")
        raise h11.RemoteProtocolError(message)


class Connection(H11Protocol):
    """`uvicorn`'s HTTP connection with a time limit for request headers.

    `uvicorn` itself only closes connections that stay idle after a response, so that one that never sends a request, or
    sends its headers byte by byte (slowloris), would stay open forever.
    """

    _header_timer: asyncio.TimerHandle | None = None
    idle_since = 0.0
    """When it last started waiting for a request, on the monotonic clock."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = _Parser(h11.SERVER, self.conn._max_incomplete_event_size)
        self.idle_since = time.monotonic()
        self._update_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_header_timer()

    def on_response_complete(self) -> None:
        self.idle_since = time.monotonic()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Respond to an invalid request if a response can still be sent, and close the connection."""
        error = self.conn.error if isinstance(self.conn, _Parser) else None
        error = error or ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http")
        if self.cycle is not None and not self.cycle.response_complete:  # type: ignore[redundant-expr]
            self.cycle.disconnected = True  # the app cannot send anything more
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            reason = HTTPStatus(error.status).phrase.encode()
            head = h11.Response(status_code=error.status, headers=list(headers.items()), reason=reason)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore the upgrade request; `uvicorn` would log a hint about WebSockets for every one."""

    @property
    def idle(self) -> bool:
        """Whether it is waiting for a request, or for the rest of its headers."""
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def _update_header_timer(self) -> None:
        """Run the timer while the connection is idle; receiving more of the same headers does not restart it."""
        if not self.idle:
            self._cancel_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.timeout_keep_alive_handler)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def connection_limit(max_connections: int) -> int:
    """`max_connections`, or fewer if the open-file limit requires it."""
    if sys.platform == "win32":
        return max_connections
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return max_connections
    limit = min(max_connections, files - len(list(Path("/dev/fd").iterdir())) - RESERVED_FILES)
    if limit < 1:
        raise ConfigError(f"the limit of {files} open files leaves none for connections: raise it with ulimit -n")
    return limit


class Acceptor:
    """Accepts connections from a listening socket, at most `limit` at once.

    At the limit, a new connection closes the one that has been idle longest, or gets a 503 if none is idle. `asyncio`'s
    own server has no limit, and once the process is out of file descriptors it logs a traceback for every attempt.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_connection: Callable[[], Connection],
        connections: Collection[Connection],
        limit: int,
    ) -> None:
        """`connections` contains the open connections; `uvicorn` updates it."""
        self._sock, self._make_connection = sock, make_connection
        self._connections, self._limit = connections, limit
        self._last_warning = -LOG_INTERVAL
        sock.settimeout(0)
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Stop accepting connections."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # usually the client has already disconnected
                if error.errno in OUT_OF_RESOURCES:
                    self._warn(f"cannot accept a connection ({error.strerror}): closing idle ones")
                    self._close_idle()
                    await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                if await self._below_limit():
                    await loop.connect_accepted_socket(self._make_connection, client)
                else:
                    _reject(client)
            except OSError:
                client.close()

    async def _below_limit(self) -> bool:
        while len(self._connections) >= self._limit:
            self._warn(f"{self._limit} connections are open: closing idle ones for new ones")
            if not self._close_idle():
                return False
            await asyncio.sleep(0)
        return True

    def _close_idle(self) -> bool:
        """Close the connection that has been idle longest, on the next loop iteration; False if none is idle."""
        idle = [connection for connection in self._connections if connection.idle]
        if idle:
            min(idle, key=lambda connection: connection.idle_since).transport.abort()
        return bool(idle)

    def _warn(self, message: str) -> None:
        if (now := time.monotonic()) - self._last_warning >= LOG_INTERVAL:
            self._last_warning = now
            _log.warning(message)


def _reject(client: socket.socket) -> None:
    """Send a 503 without blocking."""
    error = ApiError(503, "all connections of this server are in use: try again later", code="too_many_connections")
    body = json.dumps(error.body)
    head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with client, contextlib.suppress(OSError):
        client.send(f"{head}Retry-After: 1\r\nConnection: close\r\n\r\n{body}".encode())
        client.shutdown(socket.SHUT_WR)
        client.recv(65536)  # closing with unread data would reset the connection before the client reads the response
