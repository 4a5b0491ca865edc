"""Told to stop, the server lets what runs finish, turns the rest away, and ends well."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.e2e.serving import httpx, serving


def asked(length: int) -> dict:
    return {"model": "tiny", "prompt": "Once", "max_tokens": length, "stream": True, "logit_bias": {"50256": -100}}


def test_shutdown_finishes_streams_and_rejects_new_requests(tiny: Path):
    with serving(tiny, key=None) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json=asked(300)) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            server.process.send_signal(signal.SIGTERM)
            turned_away = httpx.Response(200)
            while turned_away.status_code == 200:  # until the signal has arrived
                turned_away = httpx.post(f"{server.url}/v1/completions", json=asked(1), timeout=30)
            assert (turned_away.status_code, turned_away.json()["error"]["code"]) == (503, "draining")
            assert int(turned_away.headers["Retry-After"]) > 0
            assert httpx.get(f"{server.url}/health").status_code == 503
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(20) == 0


def test_a_second_signal_stops_running_requests(tiny: Path):
    with serving(tiny, key=None) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json=asked(4000)) as answer:
            lines = answer.iter_lines()
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
