"""What comes in: one body of bounded size in bounded time, in bounded number; whoever leaves has their work stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whimbrel.server.body import check_body
from whimbrel.server.config import ServeConfig
from whimbrel.server.errors import ApiError
from whimbrel.server.gate import discard_body, has_body, header, refuse, stopping
from whimbrel.server.traffic import Traffic

__all__ = ["Intake", "at_the_end"]

LEASE = "whimbrel.lease"
"""Where a request keeps what must be undone when it ends, however it ends."""


class Intake:
    """ASGI middleware that reads a body whole, counts the requests held, and stops the work of a client that left."""

    def __init__(self, app: ASGIApp, config: ServeConfig, traffic: Traffic, paths: Collection[str]) -> None:
        """`paths` are those that take a body."""
        self.app, self.config, self.traffic, self.paths = app, config, traffic, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one request in and see it through."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["method"] != "POST" or scope["path"] not in self.paths:
            await self._without_body(scope, receive, send)
        elif self.traffic.held >= self.config.max_requests:
            busy = ApiError(
                429,
                f"the server holds {self.traffic.held} requests, which is all it takes: ask again later",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
            await refuse(busy, scope, receive, send)
        else:
            with ExitStack() as lease:
                lease.enter_context(self.traffic.one_more())
                try:
                    body = await self._read(scope, receive)
                except ApiError as error:
                    await refuse(error, scope, receive, send)
                else:
                    if body is not None:
                        await self._take_on(scope, body, receive, send, lease)

    async def _without_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app on a request whose body it does not read; close the connection if the body does not end soon."""
        if not has_body(scope):
            return await self.app(scope, receive, send)
        whole = not header(scope, b"expect") and await discard_body(receive)

        async def close(message: Message) -> None:
            if message["type"] == "http.response.start" and not whole:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        return await self.app(scope, receive, close)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, or None where the client left before its end."""
        kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                415, f"Content-Type is {kind or 'not given'!r}: send application/json", code="unsupported_media_type"
            )
        declared = header(scope, b"content-length") or ""
        if declared.isdecimal() and int(declared) > self.config.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with self.traffic.reading(self.config.body_seconds):
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
            if self.traffic.draining:
                raise stopping() from None
            raise ApiError(
                408, f"the body was not sent within {self.config.body_seconds:g} s", code="body_timeout"
            ) from None

    def _too_large(self) -> ApiError:
        most = self.config.max_body_bytes
        return ApiError(413, f"the body is larger than {most} bytes, which is all the server takes", code="too_large")

    async def _take_on(self, scope: Scope, body: bytes, receive: Receive, send: Send, lease: ExitStack) -> None:
        try:
            check_body(body)
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            await self._see_through(scope, body, receive, send, lease)

    async def _see_through(self, scope: Scope, body: bytes, receive: Receive, send: Send, lease: ExitStack) -> None:
        """Run the app on a body already read; it is cancelled as soon as the client goes away or stops reading."""
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        answered = asyncio.Event()

        async def hand_on() -> Message:
            if not unread:
                await asyncio.Event().wait()  # the app learns that a client left by being cancelled
            return unread.pop()

        async def hand_back(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                answered.set()
                lease.close()  # before the client can read the end, and ask again
            try:
                async with asyncio.timeout(self.config.stall_seconds):
                    await send(message)
            except TimeoutError:
                logging.getLogger(__name__).info("a client stopped reading: its request is dropped")
                raise asyncio.CancelledError from None

        work = asyncio.ensure_future(self.app({**scope, LEASE: lease}, hand_on, hand_back))
        leaving = asyncio.create_task(_departure(receive))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not answered.is_set():
                work.cancel()
            await asyncio.wait({work})
        finally:
            work.cancel()
            leaving.cancel()
        if not work.cancelled() and (fault := work.exception()) is not None:
            raise fault


def at_the_end(scope: Scope, undo: Callable[[], object]) -> None:
    """Have `undo` called when the request ends, however it ends."""
    scope[LEASE].callback(undo)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
