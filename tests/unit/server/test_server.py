"""The socket that is served on."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from tests.unit.server.running import running, wait_for

from whimbrel.base.errors import ConfigError
from whimbrel.server import ServeConfig
from whimbrel.server.connection import connection_limit
from whimbrel.server.served import Served
from whimbrel.server.server import bind, url_of


def test_connections_send_at_once():
    with bind(ServeConfig(port=0)) as door:
        door.listen()
        with socket.create_connection(door.getsockname()), door.accept()[0] as line:
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_bound_address_refuses_connections_until_it_is_served():
    with bind(ServeConfig(port=0)) as door, pytest.raises(ConnectionRefusedError):
        socket.create_connection(door.getsockname()).close()


def test_the_address_that_a_browser_is_told():
    with bind(ServeConfig(port=0)) as door:
        assert url_of(door) == f"http://127.0.0.1:{door.getsockname()[1]}"
    with bind(ServeConfig(host="0.0.0.0", port=0, api_key="k")) as door:
        assert url_of(door).startswith("http://127.0.0.1:")


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1 port {port}: .*; choose another --port"):
            bind(ServeConfig(port=port))


def connect(run) -> socket.socket:
    return socket.create_connection((run.client.base_url.host, run.client.base_url.port), timeout=30)


def test_idle_connections_are_closed_for_new_ones(served: Served, caplog):
    with running(served, max_connections=4) as run:
        idle = [connect(run) for _ in range(40)]
        assert run.client.get("/health").status_code == 200
        assert len(run.server.server_state.connections) <= 4
        assert idle[0].recv(1) == b""
        for each in idle:
            each.close()
    assert len([record for record in caplog.records if "4 connections are open" in record.message]) == 1


def test_a_connection_is_told_when_all_others_are_busy(served: Served):
    body = b'{"model": "tiny", "prompt": "Once", "max_tokens": 1}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with running(served, max_connections=2) as run:
        run.engine.go_on.clear()
        busy = [connect(run) for _ in range(2)]
        for each in busy:
            each.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: run.service.traffic.held == 2)
        with connect(run) as line:
            answer = line.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_connections" in answer
        run.engine.go_on.set()
        for each in busy:
            assert each.recv(4096).startswith(b"HTTP/1.1 200 ")
            each.close()


def test_the_limit_of_open_files_bounds_connections(monkeypatch: pytest.MonkeyPatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    assert 0 < connection_limit(1024) < 256
    assert connection_limit(8) == 8
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8, 4096))
    with pytest.raises(ConfigError, match="the limit of 8 open files leaves none for connections: raise it"):
        connection_limit(1024)


@pytest.mark.parametrize("request_line", ["POST /v1/completions", "GET /health", "POST /nothing"])
def test_an_unfinished_body_does_not_delay_shutdown(served: Served, request_line: str):
    head = (
        f"{request_line} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"
    )
    with running(served, body_seconds=600, drain_seconds=600) as run, connect(run) as line:
        line.sendall(head.encode())
        wait_for(lambda: bool(run.server.server_state.tasks))
        run.service.worker._loop.call_soon_threadsafe(run.server.stop)
        answer = line.makefile("rb").read()  # to its end: the connection is closed
        assert answer.startswith((b"HTTP/1.1 503 ", b"HTTP/1.1 404 "))
        run.thread.join(60)
        assert not run.thread.is_alive()


@pytest.mark.parametrize("framing", ["Content-Length: 99999", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("request_line", ["GET /health", "DELETE /v1/models", "OPTIONS /"])
def test_a_body_that_no_route_reads_ends_the_connection(served: Served, request_line: str, framing: str):
    with running(served) as run, connect(run) as line:
        line.sendall(f"{request_line} HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n\r\n1\r\na".encode())
        answer = line.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 ")
        assert b"connection: close" in answer.lower()


def test_a_body_that_no_route_reads_and_that_ends_leaves_the_connection_open(served: Served):
    with running(served) as run:
        assert run.client.request("GET", "/health", content=b"ignored").status_code == 200
        answer = run.client.request("GET", "/health", content=iter([b"ignored"] * 3))
        assert answer.status_code == 200
        assert "connection" not in answer.headers
