"""Limits on bodies, and clients that disconnect, at the ASGI level."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")


from whimbrel.server.config import ServeConfig
from whimbrel.server.errors import ApiError
from whimbrel.server.middleware import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_STRINGS,
    MAX_VALUES,
    BodyMiddleware,
    RequestTracker,
    check_json_structure,
    on_request_end,
)

PATH = "/v1/completions"


class Client:
    """One ASGI request: the messages to receive, and those that were sent."""

    def __init__(
        self, *bodies: bytes, complete: bool = True, content_type: str = "application/json", connected: bool = True
    ) -> None:
        headers = [(b"content-type", content_type.encode())]
        headers.append((b"transfer-encoding", b"chunked"))
        self.scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
        last = len(bodies) - 1
        self.messages = [
            {"type": "http.request", "body": body, "more_body": not complete or index < last}
            for index, body in enumerate(bodies)
        ]
        self.disconnected = asyncio.Event()
        if not connected:
            self.disconnected.set()
        self.sent: list[dict] = []
        self.can_send = asyncio.Event()
        self.can_send.set()

    async def receive(self) -> dict:
        if self.messages:
            return self.messages.pop(0)
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        await self.can_send.wait()
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def code(self) -> str:
        return json.loads(self.sent[1]["body"])["error"]["code"]


class App:
    """Responds with the request body, or forever."""

    def __init__(self, *, endless: bool = False) -> None:
        self.endless, self.started, self.cleanups, self.body_received = endless, asyncio.Event(), 0, b""

    def clean_up(self) -> None:
        self.cleanups += 1

    async def __call__(self, scope, receive, send) -> None:
        self.body_received = (await receive())["body"]
        on_request_end(scope, self.clean_up)
        self.started.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while self.endless:
            await send({"type": "http.response.body", "body": b"more", "more_body": True})
            await asyncio.sleep(0.001)
        await send({"type": "http.response.body", "body": self.body_received})


def run_middleware(make_client, app_options=None, action=None, **settings) -> tuple[Client, App, RequestTracker]:
    async def run() -> tuple[Client, App, RequestTracker]:
        client, app, requests = make_client(), App(**(app_options or {})), RequestTracker()
        intake = BodyMiddleware(app, ServeConfig(**settings), requests, [PATH])
        async with asyncio.timeout(20):
            work = asyncio.create_task(intake(client.scope, client.receive, client.send))
            if action is not None:
                await action(client, app)
            await work
            await requests.wait_idle()
        return client, app, requests

    return asyncio.run(run())


def test_a_chunked_body_reaches_the_app_complete():
    client, app, requests = run_middleware(lambda: Client(b"{", b"1", b"}"))
    assert (client.status, app.body_received, app.cleanups, requests.active) == (200, b"{1}", 1, 0)


def test_chunks_that_exceed_the_size_limit_in_total_get_413():
    client, app, _ = run_middleware(lambda: Client(b"a" * 6, b"a" * 6), max_body_bytes=10)
    assert (client.status, client.code, app.started.is_set()) == (413, "too_large", False)


def test_a_body_that_does_not_arrive_gets_408():
    client, app, _ = run_middleware(lambda: Client(b"{", complete=False), body_seconds=0.05)
    assert (client.status, client.code, app.started.is_set()) == (408, "body_timeout", False)


def test_another_content_type_gets_415():
    client, _, _ = run_middleware(lambda: Client(b"a", content_type="text/plain"))
    assert (client.status, client.code) == (415, "unsupported_media_type")
    assert run_middleware(lambda: Client(b"{}", content_type="Application/JSON; charset=utf-8"))[0].status == 200


def test_a_disconnect_while_sending_the_body_ends_the_request():
    client, app, requests = run_middleware(lambda: Client(b"{", complete=False, connected=False))
    assert (client.sent, app.started.is_set(), requests.active) == ([], False, 0)


def test_a_disconnect_cancels_the_app():
    async def leave(client: Client, app: App) -> None:
        await app.started.wait()
        client.disconnected.set()

    client, app, requests = run_middleware(lambda: Client(b"{}"), {"endless": True}, leave)
    assert (client.status, app.cleanups, requests.active) == (200, 1, 0)
    assert client.sent[-1].get("more_body")


def test_a_client_that_stops_reading_cancels_the_app():
    async def stall(client: Client, app: App) -> None:
        await app.started.wait()
        client.can_send.clear()

    _, app, requests = run_middleware(lambda: Client(b"{}"), {"endless": True}, stall, stall_seconds=0.05)
    assert (app.cleanups, requests.active) == (1, 0)


def test_exceptions_of_the_app_propagate():
    async def run() -> None:
        async def app(scope, receive, send) -> None:
            raise ZeroDivisionError

        client, requests = Client(b"{}"), RequestTracker()
        with pytest.raises(ZeroDivisionError):
            await BodyMiddleware(app, ServeConfig(), requests, [PATH])(client.scope, client.receive, client.send)
        assert requests.active == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": [' + b"[1]," * 830_000 + b"[1]]}", f"{MAX_CONTAINERS} lists and objects"),
        (b'{"prompt": [' + b'"",' * 830_000 + b'""]}', f"{MAX_STRINGS} strings"),
        (b"[" + b"1," * MAX_VALUES + b"1]", f"{MAX_VALUES} values"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), f"{MAX_DEPTH} levels"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), f"{MAX_DEPTH} levels"),
        (b'["\\\\",' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"]", f"{MAX_DEPTH} levels"),
        (json.dumps({"prompt": ["a"]}).encode("utf-16"), "zero byte"),
        (json.dumps({"prompt": ["a"]}).encode("utf-32-le"), "zero byte"),
    ],
    ids=range(8),
)
def test_a_body_that_is_expensive_to_parse_is_rejected(body: bytes, message: str):
    with pytest.raises(ApiError, match=message) as excinfo:
        check_json_structure(body)
    assert excinfo.value.status == 400


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "[{," * 1_000_000},
        {"prompt": '\\"[' * 500_000},
        {"prompt": '[\\\\"{,' * 300_000 + "\\"},
        {"prompt": [1] * 500_000},
        {"prompt": [[1, 2]] * 4000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "[\\"}] * 2}] * 4096},
        [[[[]]]],
    ],
    ids=range(7),
)
def test_long_strings_and_ordinary_structures_are_accepted(value: object):
    check_json_structure(json.dumps(value).encode())
