"""Who may come in: by which name the server was called, with which key, and whether it still takes requests."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from whimbrel.server.config import ServeConfig, is_loopback
from whimbrel.server.errors import ApiError
from whimbrel.server.traffic import Traffic

__all__ = ["Gate", "discard_body", "has_body", "header", "refuse", "stopping"]

LINGER_SECONDS = 1.0
"""How long the rest of a refused body is read and thrown away. To close while a client still sends would reset the
connection, and the client would never read why."""


class Gate:
    """ASGI middleware that turns away who may not come in, before a byte of the body is read."""

    def __init__(self, app: ASGIApp, config: ServeConfig, traffic: Traffic, open_paths: Collection[str]) -> None:
        """`open_paths` are read without a key."""
        self.app, self.traffic, self.open_paths = app, traffic, frozenset(open_paths)
        self.digest = None if config.api_key is None else _digest(config.api_key.encode())
        self.own_names = is_loopback(config.host)
        self.names = frozenset(name.lower() for name in config.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or say why not."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            self._check_host(scope)
            self._check_key(scope)
            if self.traffic.draining and scope["method"] == "POST":
                raise stopping()
        except ApiError as error:
            return await refuse(error, scope, receive, send)
        return await self.app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """A page of another site can have its own name lead to this machine: such a call names that site."""
        if "*" in self.names or not (self.own_names or self.names):
            return
        given = header(scope, b"host") or ""
        try:
            name = urlsplit(f"//{given}").hostname or ""
        except ValueError:
            name = ""
        if name in self.names or (self.own_names and is_loopback(name)):
            return
        raise ApiError(
            421, f"this server does not answer to the name {given!r}: start it with --allow-host", code="unknown_host"
        )

    def _check_key(self, scope: Scope) -> None:
        if self.digest is None or (scope["path"] in self.open_paths and scope["method"] in {"GET", "HEAD"}):
            return
        scheme, _, given = (header(scope, b"authorization") or "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(_digest(given.strip().encode("latin-1")), self.digest):
            return
        what = "no API key was given" if not given else "that is not this server's API key"
        raise ApiError(
            401,
            f"{what}: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def stopping() -> ApiError:
    """The error for new requests while the server drains."""
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError(503, "the server is shutting down: try again later", code="draining", headers=headers)


def has_body(scope: Scope) -> bool:
    """Whether a request has a body of any length."""
    return any(
        key == b"transfer-encoding" or (key == b"content-length" and value.strip(b"0 "))
        for key, value in scope["headers"]
    )


async def discard_body(receive: Receive) -> bool:
    """Read the rest of a body for at most `LINGER_SECONDS`; True if it ended or the client disconnected."""
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body"):
                pass
    except TimeoutError:
        return False
    return True


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with `error`, once the client has had a moment to send the rest of its body."""
    # A client that waits for 100-continue sends no body after an error response.
    if has_body(scope) and not header(scope, b"expect") and not await discard_body(receive):
        error.headers["Connection"] = "close"
    await error.response()(scope, receive, send)


def header(scope: Scope, name: bytes) -> str | None:
    """The value of a header that was given once; None where it was not, or more than once."""
    found = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
    return found[0] if len(found) == 1 else None


def _digest(text: bytes) -> bytes:
    """Keys are compared by their digests: equal lengths, so that the time taken tells nothing."""
    return hashlib.sha256(text).digest()
