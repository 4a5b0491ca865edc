"""Validation of the server settings."""

from __future__ import annotations

import pytest

from whimbrel.base.errors import ConfigError
from whimbrel.server import ServeConfig, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_key(host: str):
    assert is_loopback(host)
    assert ServeConfig(host=host).api_key is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org", "localhost.example.org", ""])
def test_other_addresses_require_a_key(host: str):
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="set an API key"):
        ServeConfig(host=host)
    assert ServeConfig(host=host, api_key="k").host == host


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": -1}, "port: .* got -1"),
        ({"max_requests": 0}, "max_requests: .* got 0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens: .* got 0"),
        ({"body_seconds": 0.0}, "body_seconds: .* got 0.0"),
        ({"drain_seconds": -1.0}, "drain_seconds: .* got -1.0"),
        ({"drain_seconds": float("inf")}, "drain_seconds: .* got inf"),
        ({"allowed_hosts": ("",)}, "allowed_hosts: .* got ''"),
        ({"allowed_hosts": ("a.example", "http://b.example")}, "allowed_hosts: .* got 'http://b.example'"),
        ({"api_key": ""}, "non-empty"),
        ({"api_key": "schlüssel"}, "printable ASCII"),
        ({"api_key": "a\nb"}, "printable ASCII"),
        ({"api_key": "a b"}, "without spaces"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**settings)
