"""Sockets and connections: limits, timeouts, malformed HTTP, shutdown."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

import asyncio

import uvicorn
from tests.unit.server.running_server import running, wait_for
from uvicorn.server import ServerState

from whimbrel.base.errors import ConfigError
from whimbrel.server import ServeConfig, http
from whimbrel.server.http import Connection, bind_socket, connection_limit, server_url
from whimbrel.server.served_model import ServedModel


def test_connections_have_tcp_nodelay():
    with bind_socket(ServeConfig(port=0)) as sock:
        sock.listen()
        with socket.create_connection(sock.getsockname()), sock.accept()[0] as conn:
            assert conn.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_bound_socket_rejects_connections_until_served():
    with bind_socket(ServeConfig(port=0)) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname()).close()


def test_server_url():
    with bind_socket(ServeConfig(port=0)) as sock:
        assert server_url(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    with bind_socket(ServeConfig(host="0.0.0.0", port=0, api_key="k")) as sock:
        assert server_url(sock).startswith("http://127.0.0.1:")


def test_a_port_in_use_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: .*--port"):
            bind_socket(ServeConfig(port=port))


def connect(run) -> socket.socket:
    return socket.create_connection((run.client.base_url.host, run.client.base_url.port), timeout=30)


def test_idle_connections_are_closed_for_new_ones(served: ServedModel, caplog):
    with running(served, max_connections=4) as run:
        idle = [connect(run) for _ in range(40)]
        assert run.client.get("/health").status_code == 200
        assert len(run.server.server_state.connections) <= 4
        assert idle[0].recv(1) == b""
        for each in idle:
            each.close()
    assert len([record for record in caplog.records if "4 connections are open" in record.message]) == 1


def test_a_connection_gets_503_when_all_others_are_busy(served: ServedModel):
    body = b'{"model": "tiny", "prompt": "Once", "max_tokens": 1}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with running(served, max_connections=2) as run:
        run.engine.unblock.clear()
        busy = [connect(run) for _ in range(2)]
        for each in busy:
            each.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: run.service.requests.active == 2)
        with connect(run) as conn:
            response = conn.makefile("rb").read()
        assert response.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_connections" in response
        run.engine.unblock.set()
        for each in busy:
            assert each.recv(4096).startswith(b"HTTP/1.1 200 ")
            each.close()


def test_the_open_file_limit_bounds_connections(monkeypatch: pytest.MonkeyPatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    assert 0 < connection_limit(1024) < 256
    assert connection_limit(8) == 8
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8, 4096))
    with pytest.raises(ConfigError, match="8 open files.*ulimit"):
        connection_limit(1024)


@pytest.mark.parametrize("request_line", ["POST /v1/completions", "GET /health", "POST /nothing"])
def test_an_unfinished_body_does_not_delay_shutdown(served: ServedModel, request_line: str):
    head = (
        f"{request_line} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"
    )
    with running(served, body_seconds=600, drain_seconds=600) as run, connect(run) as conn:
        conn.sendall(head.encode())
        wait_for(lambda: bool(run.server.server_state.tasks))
        run.service.worker._loop.call_soon_threadsafe(run.server.stop)
        response = conn.makefile("rb").read()  # until EOF: the connection is closed
        assert response.startswith((b"HTTP/1.1 503 ", b"HTTP/1.1 404 "))
        run.thread.join(60)
        assert not run.thread.is_alive()


@pytest.mark.parametrize("framing", ["Content-Length: 99999", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("request_line", ["GET /health", "DELETE /v1/models", "OPTIONS /"])
def test_an_unfinished_body_that_no_route_reads_closes_the_connection(
    served: ServedModel, request_line: str, framing: str
):
    with running(served) as run, connect(run) as conn:
        conn.sendall(f"{request_line} HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n\r\n1\r\na".encode())
        response = conn.makefile("rb").read()
        assert response.startswith(b"HTTP/1.1 ")
        assert b"connection: close" in response.lower()


def test_a_complete_body_that_no_route_reads_keeps_the_connection_open(served: ServedModel):
    with running(served) as run:
        assert run.client.request("GET", "/health", content=b"ignored").status_code == 200
        response = run.client.request("GET", "/health", content=iter([b"ignored"] * 3))
        assert response.status_code == 200
        assert "connection" not in response.headers


REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def app(scope, receive, send):
    await asyncio.sleep(0.3)  # longer than HEADER_SECONDS
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def exchange(monkeypatch):
    """Sends pieces 0.1 s apart; returns what was received until the connection closed, and how many were sent."""
    monkeypatch.setattr(http, "HEADER_SECONDS", 0.2)

    async def run(pieces: list[bytes]) -> tuple[bytes, int]:
        config, state = uvicorn.Config(app, log_config=None), ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            reading, sent = asyncio.create_task(reader.read()), 0
            while sent < len(pieces) and not reading.done():
                writer.write(pieces[sent])
                sent += 1
                await asyncio.sleep(0.1)
            try:
                return await asyncio.wait_for(reading, 30), sent
            except ConnectionResetError:  # the server closed the connection while we were sending
                return b"", sent
            finally:
                writer.close()
                await asyncio.gather(*state.tasks)

    return lambda *pieces: asyncio.run(run(list(pieces)))


def test_a_silent_connection_is_closed(exchange):
    assert exchange() == (b"", 0)


def test_a_connection_that_never_finishes_its_headers_is_closed(exchange):
    received, sent = exchange(b"GET / HTTP/1.1\r\n", *[b"X: a\r\n"] * 200)
    assert received == b""
    assert sent < 100


def test_a_slow_response_does_not_count_against_the_header_timeout(exchange):
    received, _ = exchange(REQUEST[:20], REQUEST[20:], b"", b"", b"", b"", REQUEST, b"", b"", b"", b"GET / HTTP")
    assert received.count(b"200 OK") == 2


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n",
        b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_content_length_with_transfer_encoding_is_rejected(exchange, head: bytes):
    received, _ = exchange(head + b"0\r\n\r\n" + REQUEST)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"not both" in received


def test_a_body_of_too_many_chunks_is_rejected(exchange, caplog):
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    received, _ = exchange(head + b"1\r\na\r\n" * http.MAX_CHUNKS + b"0\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200 ")
    received, _ = exchange(head, b"1\r\na\r\n" * (http.MAX_CHUNKS + 1))
    assert received.startswith(b"HTTP/1.1 413 ")
    assert received.count(b"HTTP/1.1 ") == 1
    assert "Traceback" not in caplog.text


def test_invalid_http_is_rejected_even_after_a_response(exchange, caplog):
    received, _ = exchange(b"nonsense\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b'"code": "invalid_http"' in received
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    received, _ = exchange(
        head, b"1\r\na\r\n", b"", b"", b"", b"", b"nonsense\r\n"
    )  # the response comes before the end
    assert received.count(b"HTTP/1.1 ") == 1
    assert "Traceback" not in caplog.text
