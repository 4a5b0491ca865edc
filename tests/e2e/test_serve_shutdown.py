"""Shutdown: running requests finish, new ones are rejected, the exit status is 0."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.e2e.serving import httpx, serving


def request_body(length: int) -> dict:
    return {"model": "tiny", "prompt": "Once", "max_tokens": length, "stream": True, "logit_bias": {"50256": -100}}


def test_shutdown_finishes_streams_and_rejects_new_requests(tiny: Path):
    with serving(tiny, key=None) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json=request_body(300)) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            server.process.send_signal(signal.SIGTERM)
            rejected = httpx.Response(200)
            while rejected.status_code == 200:  # until the signal has arrived
                rejected = httpx.post(f"{server.url}/v1/completions", json=request_body(1), timeout=30)
            assert (rejected.status_code, rejected.json()["error"]["code"]) == (503, "draining")
            assert int(rejected.headers["Retry-After"]) > 0
            assert httpx.get(f"{server.url}/health").status_code == 503
            remaining = [line for line in lines if line]
        assert remaining[-1] == "data: [DONE]"
        assert json.loads(remaining[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(20) == 0


def test_a_second_signal_stops_running_requests(tiny: Path):
    with serving(tiny, key=None) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json=request_body(4000)) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            while httpx.get(f"{server.url}/health").status_code == 200:
                pass
            server.process.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert server.process.wait(20) == 0


def test_a_public_address_requires_a_key(tiny: Path):
    command = [sys.executable, "-m", "whimbrel", "serve", str(tiny), "--host=0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "host 0.0.0.0 can be reached from other machines" in done.stderr
    assert len(done.stderr.splitlines()) == 1
