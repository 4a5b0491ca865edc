"""Connections: HTTP parsing limits, header timeouts, and a connection limit below the open-file limit."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Collection
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from whimbrel.base.errors import ConfigError
from whimbrel.server.errors import ApiError

__all__ = ["Acceptor", "Connection", "connection_limit"]

HEAD_SECONDS = 30.0
"""How long the head of a request may take: from when a connection opens, or from its first byte after an answer."""

MAX_CHUNKS = 4096
"""Maximum number of chunks in a body. Each costs as much as a whole read, so tiny chunks would starve other clients."""

SPARE_FILES = 32
"""File descriptors reserved for everything except connections."""

RETRY_SECONDS = 0.1
LOG_SECONDS = 10.0
"""Minimum time between two warnings about too many connections."""

EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_log = logging.getLogger(__name__)


class _Parser(h11.Connection):
    """`h11` that rejects ambiguous and disproportionately expensive requests."""

    fault: ApiError | None = None
    """Why the last request was rejected; None if it is not valid HTTP."""
    _chunks = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next part of a request."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                # Request smuggling: a proxy may use the other length and parse the rest of the body as a request.
                self._refuse(400, "send either Content-Length or Transfer-Encoding (HTTP/1.1), not both")
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            if self._chunks > MAX_CHUNKS:
                self._refuse(413, f"the body has more than {MAX_CHUNKS} chunks: send larger ones")
        return event

    def _refuse(self, status: int, message: str) -> NoReturn:
        self.fault = ApiError(status, message, code="invalid_http" if status == 400 else "too_large")
        raise h11.RemoteProtocolError(message)


class Connection(H11Protocol):
    """`uvicorn`'s, which by itself only ends connections that stay silent after an answer."""

    _overdue: asyncio.TimerHandle | None = None
    idle_since = 0.0
    """When it last started waiting for a request, on the monotonic clock."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self.conn = _Parser(h11.SERVER, self.conn._max_incomplete_event_size)
        self.idle_since = time.monotonic()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        self._forget()

    def on_response_complete(self) -> None:
        """Start waiting for the next request."""
        self.idle_since = time.monotonic()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Reply to an invalid request if a response can still be sent, and close the connection."""
        fault = self.conn.fault if isinstance(self.conn, _Parser) else None
        fault = fault or ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http")
        if self.cycle is not None and not self.cycle.response_complete:  # type: ignore[redundant-expr]
            self.cycle.disconnected = True  # its app can send nothing more
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(fault.body).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            reason = HTTPStatus(fault.status).phrase.encode()
            head = h11.Response(status_code=fault.status, headers=list(headers.items()), reason=reason)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore the upgrade request; `uvicorn` would log a hint about WebSockets for every one."""

    @property
    def idle(self) -> bool:
        """Whether it is waiting for a request, or for the rest of its headers."""
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def _watch(self) -> None:
        """Have the time run while a head is awaited; more of the same head does not stop it."""
        if not self.idle:
            self._forget()
        elif self._overdue is None:
            self._overdue = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _forget(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None


def connection_limit(most: int) -> int:
    """`most`, or fewer if the open-file limit requires it."""
    if sys.platform == "win32":
        return most
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return most
    limit = min(most, files - len(list(Path("/dev/fd").iterdir())) - SPARE_FILES)
    if limit < 1:
        raise ConfigError(f"the limit of {files} open files leaves none for connections: raise it with ulimit -n")
    return limit


class Acceptor:
    """Accepts connections from a listening socket, at most `limit` at once.

    At the limit, a new connection closes the one that has been idle longest, or gets a 503 if none is idle. `asyncio`'s
    own server has no limit, and once the process is out of file descriptors it logs a traceback for every attempt.
    """

    def __init__(
        self, door: socket.socket, make: Callable[[], Connection], connections: Collection[Connection], limit: int
    ) -> None:
        """`make` creates the protocol of a connection; `connections` contains it while it is open."""
        self._door, self._make, self._connections, self._limit = door, make, connections, limit
        self._logged = -LOG_SECONDS
        door.settimeout(0)
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Stop accepting connections."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the acceptor has stopped."""
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                line, _ = await loop.sock_accept(self._door)
            except OSError as error:  # usually the client has already disconnected
                if error.errno in EXHAUSTED:
                    self._warn(f"cannot accept a connection ({error.strerror}): closing idle ones")
                    self._close_idle()
                    await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                if await self._has_room():
                    await loop.connect_accepted_socket(self._make, line)
                else:
                    _turn_away(line)
            except OSError:
                line.close()

    async def _has_room(self) -> bool:
        while len(self._connections) >= self._limit:
            self._warn(f"{self._limit} connections are open: closing idle ones for new ones")
            if not self._close_idle():
                return False
            await asyncio.sleep(0)
        return True

    def _close_idle(self) -> bool:
        """Close the connection that has been idle longest, on the next loop iteration; False if none is idle."""
        idle = [each for each in self._connections if each.idle]
        if idle:
            min(idle, key=lambda each: each.idle_since).transport.abort()
        return bool(idle)

    def _warn(self, message: str) -> None:
        if (now := time.monotonic()) - self._logged >= LOG_SECONDS:
            self._logged = now
            _log.warning(message)


def _turn_away(line: socket.socket) -> None:
    """Send a 503 without blocking."""
    error = ApiError(503, "all connections of this server are in use: try again later", code="too_many_connections")
    body = json.dumps(error.body)
    head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with line, contextlib.suppress(OSError):
        line.send(f"{head}Retry-After: 1\r\nConnection: close\r\n\r\n{body}".encode())
        line.shutdown(socket.SHUT_WR)
        line.recv(65536)  # closing with unread data would reset the connection before the client reads the response
