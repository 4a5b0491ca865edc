"""Settings of the HTTP server: address, authentication and limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from whimbrel.base.errors import ConfigError

__all__ = ["ServeConfig", "is_loopback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Validated on construction: raises ConfigError."""

    host: str = "127.0.0.1"
    """Address to listen on. Any address other than loopback requires `api_key`."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    api_key: str | None = None
    """Key that clients must send as `Authorization: Bearer KEY`, except for /health and the files of the web pages
    (and /page/access, which says whether the key is accepted)."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that requests may use; `*` allows any. On a loopback address, loopback names are always allowed."""
    max_requests: int = 256
    """Maximum number of requests running or waiting; further ones get a 429."""
    max_connections: int = 1024
    """Maximum number of open connections; fewer if the open-file limit is too low. New ones replace idle ones."""
    max_choices: int = 256
    """Maximum number of completions per request: prompts times `n`."""
    max_body_bytes: int = 4 * 1024**2
    """Maximum size of a request body."""
    max_prompt_tokens: int | None = None
    """Maximum prompt length. (default: the context length minus 1)"""
    body_seconds: float = 30.0
    """Time limit for a client to send a request body."""
    stall_seconds: float = 60.0
    """Time after which a client that does not read its response is disconnected."""
    drain_seconds: float = 30.0
    """Time that running requests have to finish on shutdown."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: expected 0 to 65535, got {self.port}")
        for name in ("max_requests", "max_connections", "max_choices", "max_body_bytes", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: expected at least 1, got {value}")
        for name in ("body_seconds", "stall_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}: expected a positive number of seconds, got {getattr(self, name)}")
        if not 0 <= self.drain_seconds < float("inf"):
            raise ConfigError(f"drain_seconds: expected at least 0, got {self.drain_seconds}")
        for name in self.allowed_hosts:
            if not name or not set(name).isdisjoint("/ "):
                raise ConfigError(f"allowed_hosts: expected a host name such as models.example.org, or *, got {name!r}")
        if self.api_key is not None:
            key = self.api_key
            if not (key and key.isascii() and key.isprintable()) or " " in key:
                raise ConfigError("api_key: expected non-empty printable ASCII without spaces (it is sent in a header)")
        elif not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} can be reached from other machines: set an API key (--api-key or "
                "WHIMBREL_API_KEY), or listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # any other name may resolve to any address
        return False
