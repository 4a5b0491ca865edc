"""The socket that is served on."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from whimbrel.base.errors import ConfigError
from whimbrel.serve import ServeConfig
from whimbrel.serve.server import listen, url_of


def test_connections_send_at_once():
    with listen(ServeConfig(port=0)) as door, socket.create_connection(door.getsockname()) as client:
        line, _ = door.accept()
        with line:
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        client.close()


def test_the_address_that_a_browser_is_told():
    with listen(ServeConfig(port=0)) as door:
        assert url_of(door) == f"http://127.0.0.1:{door.getsockname()[1]}"
    with listen(ServeConfig(host="0.0.0.0", port=0, api_key="k")) as door:
        assert url_of(door).startswith("http://127.0.0.1:")


def test_a_port_that_is_taken():
    with listen(ServeConfig(port=0)) as door:
        port = door.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1 port {port}: .*; choose another --port"):
            listen(ServeConfig(port=port))
