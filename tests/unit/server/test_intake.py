"""Bodies within bounds, and clients that go away, at the level of the protocol between server and app."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")


from whimbrel.server.config import ServeConfig
from whimbrel.server.intake import Intake, at_the_end
from whimbrel.server.traffic import Traffic

PATH = "/v1/completions"


class Client:
    """One request as a server hands it to an app: messages to be received, and those that were sent."""

    def __init__(self, *bodies: bytes, whole: bool = True, kind: str = "application/json", stays: bool = True) -> None:
        headers = [(b"content-type", kind.encode())]
        headers.append((b"transfer-encoding", b"chunked"))
        self.scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
        last = len(bodies) - 1
        self.messages = [
            {"type": "http.request", "body": body, "more_body": not whole or index < last}
            for index, body in enumerate(bodies)
        ]
        self.left = asyncio.Event()
        if not stays:
            self.left.set()
        self.sent: list[dict] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self) -> dict:
        if self.messages:
            return self.messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        await self.reads.wait()
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def code(self) -> str:
        return json.loads(self.sent[1]["body"])["error"]["code"]


class App:
    """Answers with the body it was given, unless it is told to go on for ever."""

    def __init__(self, *, endless: bool = False) -> None:
        self.endless, self.begun, self.undone, self.given = endless, asyncio.Event(), 0, b""

    def undo(self) -> None:
        self.undone += 1

    async def __call__(self, scope, receive, send) -> None:
        self.given = (await receive())["body"]
        at_the_end(scope, self.undo)
        self.begun.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while self.endless:
            await send({"type": "http.response.body", "body": b"more", "more_body": True})
            await asyncio.sleep(0.001)
        await send({"type": "http.response.body", "body": self.given})


def take(make_client, app_options=None, act=None, **settings) -> tuple[Client, App, Traffic]:
    async def run() -> tuple[Client, App, Traffic]:
        client, app, traffic = make_client(), App(**(app_options or {})), Traffic()
        intake = Intake(app, ServeConfig(**settings), traffic, [PATH])
        async with asyncio.timeout(20):
            work = asyncio.create_task(intake(client.scope, client.receive, client.send))
            if act is not None:
                await act(client, app)
            await work
            await traffic.ended()
        return client, app, traffic

    return asyncio.run(run())


def test_a_body_in_pieces_reaches_the_app_whole():
    client, app, traffic = take(lambda: Client(b"{", b"1", b"}"))
    assert (client.status, app.given, app.undone, traffic.held) == (200, b"{1}", 1, 0)


def test_pieces_that_add_up_to_too_much():
    client, app, _ = take(lambda: Client(b"a" * 6, b"a" * 6), max_body_bytes=10)
    assert (client.status, client.code, app.begun.is_set()) == (413, "too_large", False)


def test_a_body_that_does_not_come():
    client, app, _ = take(lambda: Client(b"{", whole=False), body_seconds=0.05)
    assert (client.status, client.code, app.begun.is_set()) == (408, "body_timeout", False)


def test_another_kind_of_body():
    client, _, _ = take(lambda: Client(b"a", kind="text/plain"))
    assert (client.status, client.code) == (415, "unsupported_media_type")
    assert take(lambda: Client(b"{}", kind="Application/JSON; charset=utf-8"))[0].status == 200


def test_a_client_that_leaves_before_its_body_is_whole():
    client, app, traffic = take(lambda: Client(b"{", whole=False, stays=False))
    assert (client.sent, app.begun.is_set(), traffic.held) == ([], False, 0)


def test_a_client_that_leaves_stops_the_work():
    async def leave(client: Client, app: App) -> None:
        await app.begun.wait()
        client.left.set()

    client, app, traffic = take(lambda: Client(b"{}"), {"endless": True}, leave)
    assert (client.status, app.undone, traffic.held) == (200, 1, 0)
    assert client.sent[-1].get("more_body")


def test_a_client_that_reads_nothing_counts_as_gone():
    async def stall(client: Client, app: App) -> None:
        await app.begun.wait()
        client.reads.clear()

    _, app, traffic = take(lambda: Client(b"{}"), {"endless": True}, stall, stall_seconds=0.05)
    assert (app.undone, traffic.held) == (1, 0)


def test_a_fault_of_the_app_is_not_swallowed():
    async def run() -> None:
        async def app(scope, receive, send) -> None:
            raise ZeroDivisionError

        client, traffic = Client(b"{}"), Traffic()
        with pytest.raises(ZeroDivisionError):
            await Intake(app, ServeConfig(), traffic, [PATH])(client.scope, client.receive, client.send)
        assert traffic.held == 0

    asyncio.run(run())
