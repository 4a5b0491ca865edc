"""How many requests are held, and whether more may come: what the gate, the intake and the shutdown agree on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

__all__ = ["Traffic"]


class Traffic:
    """Of one server, on its event loop."""

    def __init__(self) -> None:
        self.held = 0
        """Requests that are being read, run or answered."""
        self.draining = False
        """Whether the server was told to stop: what is held goes on, nothing new begins."""
        self._reading: set[asyncio.Timeout] = set()
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

    @asynccontextmanager
    async def reading(self, seconds: float) -> AsyncIterator[None]:
        """Time limit for reading a body; raises TimeoutError when it expires or the server shuts down."""
        async with asyncio.timeout(0 if self.draining else seconds) as limit:
            self._reading.add(limit)
            try:
                yield
            finally:
                self._reading.discard(limit)

    def drain(self) -> None:
        """Let running requests finish; requests whose body has not arrived are dropped."""
        self.draining = True
        for limit in self._reading:
            limit.reschedule(0)

    async def ended(self) -> None:
        """Wait until no request is held."""
        await self._idle.wait()
