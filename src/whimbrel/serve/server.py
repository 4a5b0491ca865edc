"""A service on a socket: it listens, and when told to stop lets what runs finish."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType

import uvicorn

from whimbrel.base.errors import ConfigError
from whimbrel.base.logging import get_logger
from whimbrel.serve.app import Service
from whimbrel.serve.config import ServeConfig
from whimbrel.serve.connection import Connection

__all__ = ["Server", "listen", "url_of"]

BACKLOG = 2048
LAST_WORDS = 5
"""Seconds that answers under way have to leave once the engine has ended."""

_log = get_logger(__name__)


def listen(config: ServeConfig) -> socket.socket:
    """The socket to be served on; refused in one line where it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        door = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        what = f"cannot listen at {config.host} port {config.port}: {error.strerror or error}"
        raise ConfigError(f"{what}; choose another --port or --host") from error
    # Connections have this from their door. Without it an answer waits 40 ms for the client to acknowledge its head.
    door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return door


def url_of(door: socket.socket) -> str:
    """Where a browser on this machine finds what listens there."""
    host, port = door.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


class Server(uvicorn.Server):
    """`uvicorn`, but that a signal lets what runs finish, while new requests are told that the server stops.

    A second signal, or the end of `drain_seconds`, ends what still runs. Either way the process ends with 0.
    """

    def __init__(self, service: Service) -> None:
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
                timeout_graceful_shutdown=LAST_WORDS,
            )
        )
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    def serve_on(self, door: socket.socket) -> None:
        """Serve until told to stop."""
        asyncio.run(self.serve(sockets=[door]))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by a signal, in the thread of the event loop."""
        asyncio.get_running_loop().call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Begin to drain; the second time, end at once."""
        if self._draining is None:
            self._service.traffic.draining = True
            self._draining = asyncio.create_task(self._drain())
        else:
            self._end()

    async def _drain(self) -> None:
        held = self._service.traffic.held
        _log.info("stopping: %d requests may finish; a second signal ends them", held)
        try:
            async with asyncio.timeout(self._service.config.drain_seconds):
                await self._service.traffic.ended()
        except TimeoutError:
            _log.warning("%d requests did not finish in time", self._service.traffic.held)
        self._end()

    def _end(self) -> None:
        self._service.worker.stop()
        self.should_exit = True
