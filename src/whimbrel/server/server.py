"""HTTP server: accepts connections once it is ready, and lets running requests finish on shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from whimbrel.base.errors import ConfigError
from whimbrel.server.app import Service
from whimbrel.server.config import ServeConfig
from whimbrel.server.connection import Acceptor, Connection, connection_limit

__all__ = ["Server", "bind", "url_of"]

BACKLOG = 2048
LAST_WORDS = 5
"""Seconds that answers under way have to leave once the engine has ended."""

_log = logging.getLogger(__name__)


def bind(config: ServeConfig) -> socket.socket:
    """A socket bound to the configured address; clients cannot connect until `Server.serve_on` listens on it.

    Raises if the address is in use, so that this is reported before the model is loaded.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise _cannot_listen(config, error) from error
    door = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # where it does not let two servers share a port
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Inherited by connections. Without it, a response waits 40 ms for the client to acknowledge its headers.
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        door.bind(address)
    except OSError as error:
        door.close()
        raise _cannot_listen(config, error) from error
    return door


def _cannot_listen(config: ServeConfig, error: OSError) -> ConfigError:
    what = f"cannot listen at {config.host} port {config.port}: {error.strerror or error}"
    return ConfigError(f"{what}; choose another --port or --host")


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
        self._on_ready: Callable[[], object] | None = None

    def serve_on(self, door: socket.socket, on_ready: Callable[[], object] | None = None) -> None:
        """Serve on a bound socket until shutdown; `on_ready` is called once connections are accepted."""
        self._on_ready = on_ready
        asyncio.run(self.serve(sockets=[door]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, start the service and accept connections."""
        assert sockets is not None, "a server is started by serve_on"
        limit = connection_limit(self._service.config.max_connections)
        for door in sockets:
            try:
                door.listen(BACKLOG)
            except OSError as error:  # another process listened on the same address first
                raise _cannot_listen(self._service.config, error) from error
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the service failed to start: see the log")
        connections = self.server_state.connections
        self.servers = [Acceptor(door, self._connection, connections, limit) for door in sockets]  # type: ignore[arg-type, misc]
        self.started = True
        if self._on_ready is not None:
            self._on_ready()

    def _connection(self) -> Connection:
        return Connection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by a signal, in the thread of the event loop."""
        asyncio.get_running_loop().call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Begin to drain; the second time, end at once."""
        if self._draining is None:
            self._service.traffic.drain()
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
