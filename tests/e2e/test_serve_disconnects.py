"""Clients that leave: what they held is free again, and those who stay do not feel it."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest
from tests.e2e.serving import Running, httpx

LONG = {
    "model": "tiny",
    "prompt": "Once upon a time",
    "max_tokens": 4000,
    "temperature": 0,
    "logit_bias": {"50256": -100},
}
"""More than anyone waits for."""


def send(server: Running, body: str) -> socket.socket:
    """A request by hand, whose connection is ours to drop."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.key}\r\n"
    line = socket.create_connection((host, int(port)), timeout=20)
    line.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return line


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("n", [1, 4])
def test_a_disconnect_frees_the_kv_cache(server: Running, stream: bool, n: int):
    import json

    line = send(server, json.dumps(LONG | {"stream": stream, "n": n}))
    if stream:
        assert line.recv(64).startswith(b"HTTP/1.1 200")
    gauges = server.wait_until(lambda seen: seen["whimbrel_engine_running"] == n)
    assert gauges["whimbrel_engine_running"] == n
    assert gauges["whimbrel_engine_free_pages"] < gauges["whimbrel_engine_pages"]
    line.close()
    server.wait_until_idle()


def test_a_disconnect_before_the_end_of_the_body(server: Running):
    line = send(server, "{" + " " * 100)
    line.close()
    half = send(server, "{}")
    half.close()
    server.wait_until_idle()
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_64_clients_of_which_20_disconnect(server: Running):
    """64 at once: none is failed, all pages come back, and a text is what it is when nobody else is there."""
    lengths = [8 + number % 5 for number in range(64)]
    leaving = set(random.Random(0).sample(range(64), 20))
    prompts = [f"Chapter {number % 8}:" for number in range(64)]

    async def one(client: httpx.AsyncClient, number: int) -> tuple[int, str | None]:
        body = {"model": "tiny", "prompt": prompts[number], "temperature": 0, "stream": True, "max_tokens": 4000}
        if number not in leaving:
            body |= {"max_tokens": lengths[number]}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return answer.status_code, text
                if line.startswith("data: {"):
                    text += httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"][0]["text"]
                if number in leaving and len(text) > 20:
                    break
        return answer.status_code, None

    async def together() -> list[tuple[int, str | None]]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, headers=server.headers, limits=limits, timeout=120) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    answers = asyncio.run(together())
    server.wait_until_idle()
    assert [status for status, _ in answers] == [200] * 64
    with server.client() as client:
        for number in random.Random(1).sample(sorted(set(range(64)) - leaving), 8):
            body = {"model": "tiny", "prompt": prompts[number], "temperature": 0, "max_tokens": lengths[number]}
            alone = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            assert answers[number][1] == alone
