"""A connection that says what it wants in time, or is closed: one that never does would hold its place for ever."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Connection"]

HEAD_SECONDS = 30.0
"""How long the head of a request may take: from when a connection opens, or from its first byte after an answer."""


class Connection(H11Protocol):
    """`uvicorn`'s, which by itself only ends connections that stay silent after an answer."""

    _overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        """Have the time run while a head is awaited; more of the same head does not stop it."""
        if self.cycle is not None and not self.cycle.response_complete:  # type: ignore[redundant-expr]
            self._forget()
        elif self._overdue is None:
            self._overdue = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _forget(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
