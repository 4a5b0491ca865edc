"""Starts `whimbrel serve` in a subprocess for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

httpx = pytest.importorskip("httpx", reason="needs the package 'httpx'")

KEY = "a-key-for-tests"


@dataclass(frozen=True)
class ServerProcess:
    """A running server."""

    url: str
    process: subprocess.Popen[str]
    key: str | None = None
    model: str = "tiny"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=60, **options)

    def metrics(self) -> dict[str, float]:
        """The values of /metrics by name with labels."""
        text = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=30).text
        return {name: float(value) for name, value in re.findall(r"^(whimbrel_\S+) (\S+)$", text, flags=re.MULTILINE)}

    def wait_until(self, condition, seconds: float = 20.0) -> dict[str, float]:
        """Poll the metrics until `condition(metrics)` is true or the time is up; returns them."""
        deadline = time.monotonic() + seconds
        while not condition(metrics := self.metrics()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return metrics

    def wait_until_idle(self) -> None:
        """Wait until no sequence is active and the KV cache is free."""
        metrics = self.wait_until(is_idle)
        assert is_idle(metrics), metrics


def is_idle(metrics: dict[str, float]) -> bool:
    free = metrics["whimbrel_kv_cache_free_blocks"] == metrics["whimbrel_kv_cache_blocks"]
    return free and metrics["whimbrel_engine_running"] == metrics["whimbrel_engine_waiting"] == 0


@contextmanager
def serving(
    model: Path, *options: str, key: str | None = KEY, files: int | None = None, log: IO[str] | None = None
) -> Iterator[ServerProcess]:
    """Run `whimbrel serve` on a free port until the block ends.

    `files` is its open-file limit; `log` receives its standard error.
    """
    limited = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash"] if files else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"WHIMBREL_API_KEY": key} if key else {})
    command = [
        *limited,
        sys.executable,
        "-m",
        "whimbrel",
        "serve",
        str(model),
        "--port=0",
        "--device=cpu",
        "--kv-blocks=2048",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        first_line = process.stdout.readline()
        match = re.search(r"http://\S+", first_line)
        assert match, f"no address in {first_line!r}"
        yield ServerProcess(match.group(), process, key)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
