"""How many requests are held, and whether more may come: what the gate, the intake and the shutdown agree on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Traffic"]


class Traffic:
    """Of one server, on its event loop."""

    def __init__(self) -> None:
        self.held = 0
        """Requests that are being read, run or answered."""
        self.draining = False
        """Whether the server was told to stop: what is held goes on, nothing new begins."""
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Hold a request."""
        self.held += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.held -= 1
            if not self.held:
                self._idle.set()

    async def ended(self) -> None:
        """Wait until no request is held."""
        await self._idle.wait()
