"""Limits on the structure of a JSON body, checked before parsing: a small body can be very expensive to parse."""

from __future__ import annotations

import re

from whimbrel.server.errors import ApiError

__all__ = ["check_body"]

MAX_STRINGS = 65_536
"""Maximum number of strings in a body, including keys: 4096 messages with two parts each have fewer."""

MAX_CONTAINERS = 32_768
"""Maximum number of lists and objects in a body."""

MAX_VALUES = 1024**2
"""Maximum number of values in a body: about 4 MiB of token ids."""

MAX_DEPTH = 32
"""Maximum nesting depth. Python's own limit depends on the current stack depth."""


def check_body(body: bytes) -> None:
    """Reject a body that would block the event loop, in a few passes over its bytes without Python loops."""
    if b"\0" in body:
        raise ApiError(400, "the body is not JSON in UTF-8: it contains a zero byte", code="invalid_json")
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in body else body
    if plain.count(b'"') > 2 * MAX_STRINGS:
        raise _too_many(f"{MAX_STRINGS} strings")
    if plain.count(b"[") + plain.count(b"{") <= MAX_DEPTH and plain.count(b",") < MAX_VALUES:  # in strings or not
        return
    outside = b"".join(plain.split(b'"')[::2])
    if outside.count(b",") >= MAX_VALUES:
        raise _too_many(f"{MAX_VALUES} values")
    if outside.count(b"[") + outside.count(b"{") > MAX_CONTAINERS:
        raise _too_many(f"{MAX_CONTAINERS} lists and objects")
    depth = 0
    for bracket in re.findall(rb"[\[\]{}]", outside):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise _too_many(f"{MAX_DEPTH} levels of lists and objects")


def _too_many(what: str) -> ApiError:
    return ApiError(400, f"the body has more than {what}: send less in one request", code="invalid_value")
