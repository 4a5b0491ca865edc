"""Where the server listens, whom it answers, and how much it takes on."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from whimbrel.base.errors import ConfigError

__all__ = ["ServeConfig", "is_loopback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What a server is told besides its model."""

    host: str = "127.0.0.1"
    """The address to listen at. Any other than this machine's own loopback needs `api_key`."""
    port: int = 8000
    """The port to listen at; 0 takes a free one."""
    api_key: str | None = None
    """What a client must send as `Authorization: Bearer KEY` on every route but /health and the chat page's files."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that a client may call this server by; `*` is any. On loopback its own names are always among them."""
    max_requests: int = 256
    """Requests held at once, running or waiting; one more is answered with 429."""
    max_connections: int = 1024
    """Maximum number of open connections, lower if the open-file limit requires it. New ones replace idle ones."""
    max_choices: int = 256
    """Texts that one request may ask for: its prompts times `n`."""
    max_body_bytes: int = 4 * 1024**2
    """The largest body of a request."""
    max_prompt_tokens: int | None = None
    """The longest prompt; one less than the model's context when not given."""
    body_seconds: float = 30.0
    """How long a client may take to send a body."""
    stall_seconds: float = 60.0
    """How long a client may leave what it was sent unread before it counts as gone."""
    drain_seconds: float = 30.0
    """How long running requests may take to finish once the server was told to stop."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port} must be from 0 to 65535")
        for name in ("max_requests", "max_connections", "max_choices", "max_body_bytes", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value} must be at least 1")
        for name in ("body_seconds", "stall_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} = {getattr(self, name)} must be a positive number of seconds")
        if not 0 <= self.drain_seconds < float("inf"):
            raise ConfigError(f"drain_seconds = {self.drain_seconds} must be 0 or a positive number of seconds")
        for name in self.allowed_hosts:
            if not name or not set(name).isdisjoint("/ "):
                raise ConfigError(f"allowed_hosts holds {name!r}: give the bare name, as in models.example.org, or *")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("api_key must be visible ASCII characters, and at least one: it travels in a header")
        if self.api_key is not None and " " in self.api_key:
            raise ConfigError("api_key must hold no spaces: it travels in a header")
        if self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"host = {self.host} can be reached from other machines: set an API key (--api-key or "
                "WHIMBREL_API_KEY), or listen at 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return False
