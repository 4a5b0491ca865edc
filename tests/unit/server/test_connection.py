"""Connections that do not say what they want in time."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

import uvicorn
from uvicorn.server import ServerState

from whimbrel.server import connection
from whimbrel.server.connection import Connection

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def app(scope, receive, send):
    await asyncio.sleep(0.3)  # longer than a head may take
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def talk(monkeypatch):
    """Sends pieces, a tenth of a second between them; what came back till it was closed, and how many went."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)

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
            except ConnectionResetError:  # it was closed while we were still sending
                return b"", sent
            finally:
                writer.close()
                await asyncio.gather(*state.tasks)

    return lambda *pieces: asyncio.run(run(list(pieces)))


def test_one_that_says_nothing_is_closed(talk):
    assert talk() == (b"", 0)


def test_one_that_spells_its_head_for_ever_is_closed(talk):
    found, sent = talk(b"GET / HTTP/1.1\r\n", *[b"X: a\r\n"] * 200)
    assert found == b""
    assert sent < 100


def test_an_answer_may_take_longer_and_the_next_head_has_its_own_time(talk):
    found, _ = talk(REQUEST[:20], REQUEST[20:], b"", b"", b"", b"", REQUEST, b"", b"", b"", b"GET / HTTP")
    assert found.count(b"200 OK") == 2


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n",
        b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_two_lengths_of_one_body_are_refused_and_the_connection_closed(talk, head: bytes):
    found, _ = talk(head + b"0\r\n\r\n" + REQUEST)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert found.count(b"HTTP/1.1 ") == 1
    assert b"not both" in found


def test_a_body_of_too_many_chunks_is_refused_and_the_connection_closed(talk, caplog):
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    found, _ = talk(head + b"1\r\na\r\n" * connection.MAX_CHUNKS + b"0\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 200 ")
    found, _ = talk(head, b"1\r\na\r\n" * (connection.MAX_CHUNKS + 1))
    assert found.startswith(b"HTTP/1.1 413 ")
    assert found.count(b"HTTP/1.1 ") == 1
    assert "Traceback" not in caplog.text


def test_what_is_not_http_is_refused_also_after_an_answer(talk, caplog):
    found, _ = talk(b"nonsense\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 400 ")
    assert b'"code": "invalid_http"' in found
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    found, _ = talk(head, b"1\r\na\r\n", b"", b"", b"", b"", b"nonsense\r\n")  # the answer comes before the end
    assert found.count(b"HTTP/1.1 ") == 1
    assert "Traceback" not in caplog.text
