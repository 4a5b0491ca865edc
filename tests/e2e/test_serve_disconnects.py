"""Clients that disconnect: their KV-cache blocks are freed, and other clients are not affected."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest
from tests.e2e.serving import ServerProcess, httpx

LONG = {
    "model": "tiny",
    "prompt": "Once upon a time",
    "max_tokens": 4000,
    "temperature": 0,
    "logit_bias": {"50256": -100},
}
"""Runs much longer than the tests."""


def send(server: ServerProcess, body: str) -> socket.socket:
    """Send a request over a raw socket, which the test can close."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.key}\r\n"
    conn = socket.create_connection((host, int(port)), timeout=20)
    conn.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return conn


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "complete"])
@pytest.mark.parametrize("n", [1, 4])
def test_a_disconnect_frees_the_kv_cache(server: ServerProcess, stream: bool, n: int):
    import json

    conn = send(server, json.dumps(LONG | {"stream": stream, "n": n}))
    if stream:
        assert conn.recv(64).startswith(b"HTTP/1.1 200")
    metrics = server.wait_until(lambda seen: seen["whimbrel_engine_running"] == n)
    assert metrics["whimbrel_engine_running"] == n
    assert metrics["whimbrel_kv_cache_free_blocks"] < metrics["whimbrel_kv_cache_blocks"]
    conn.close()
    server.wait_until_idle()


def test_a_disconnect_before_the_end_of_the_body_leaves_the_server_idle(server: ServerProcess):
    conn = send(server, "{" + " " * 100)
    conn.close()
    half = send(server, "{}")
    half.close()
    server.wait_until_idle()
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_disconnecting_clients_do_not_affect_others(server: ServerProcess):
    """64 at once: none fails, all blocks are freed, and each text equals that of a single request."""
    lengths = [8 + number % 5 for number in range(64)]
    disconnecting = set(random.Random(0).sample(range(64), 20))
    prompts = [f"Chapter {number % 8}:" for number in range(64)]

    async def one(client: httpx.AsyncClient, number: int) -> tuple[int, str | None]:
        body = {"model": "tiny", "prompt": prompts[number], "temperature": 0, "stream": True, "max_tokens": 4000}
        if number not in disconnecting:
            body |= {"max_tokens": lengths[number]}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return response.status_code, text
                if line.startswith("data: {"):
                    text += httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"][0]["text"]
                if number in disconnecting and len(text) > 20:
                    break
        return response.status_code, None

    async def run_all() -> list[tuple[int, str | None]]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, headers=server.headers, limits=limits, timeout=120) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    responses = asyncio.run(run_all())
    server.wait_until_idle()
    assert [status for status, _ in responses] == [200] * 64
    with server.client() as client:
        for number in random.Random(1).sample(sorted(set(range(64)) - disconnecting), 8):
            body = {"model": "tiny", "prompt": prompts[number], "temperature": 0, "max_tokens": lengths[number]}
            expected = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            assert responses[number][1] == expected
