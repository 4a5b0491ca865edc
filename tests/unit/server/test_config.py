"""Where a server may listen, and what it is told."""

from __future__ import annotations

import pytest

from whimbrel.base.errors import ConfigError
from whimbrel.server import ServeConfig, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_key(host: str):
    assert is_loopback(host)
    assert ServeConfig(host=host).api_key is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org", "localhost.example.org", ""])
def test_any_other_address_does(host: str):
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match=r"can be reached from other machines: set an API key"):
        ServeConfig(host=host)
    assert ServeConfig(host=host, api_key="k").host == host


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": -1}, "port = -1 must be from 0 to 65535"),
        ({"max_requests": 0}, "max_requests = 0 must be at least 1"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens = 0 must be at least 1"),
        ({"body_seconds": 0.0}, "body_seconds = 0.0 must be a positive number"),
        ({"drain_seconds": -1.0}, "drain_seconds = -1.0 must be 0 or a positive number"),
        ({"drain_seconds": float("inf")}, "drain_seconds = inf"),
        ({"allowed_hosts": ("",)}, "allowed_hosts holds '': give the bare name"),
        ({"allowed_hosts": ("a.example", "http://b.example")}, "allowed_hosts holds 'http://b.example'"),
        ({"api_key": ""}, "at least one"),
        ({"api_key": "schlüssel"}, "visible ASCII"),
        ({"api_key": "a\nb"}, "visible ASCII"),
        ({"api_key": "a b"}, "no spaces"),
    ],
)
def test_what_cannot_be_used_is_refused(settings: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        ServeConfig(**settings)
