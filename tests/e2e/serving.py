"""`whimbrel serve` as a user starts it, and what a test asks of it."""

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
class Running:
    """A server that a test talks to."""

    url: str
    process: subprocess.Popen[str]
    key: str | None = None
    model: str = "tiny"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=60, **options)

    def gauges(self) -> dict[str, float]:
        """The numbers of /metrics, labels and all, by name."""
        text = httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=30).text
        return {name: float(value) for name, value in re.findall(r"^(whimbrel_\S+) (\S+)$", text, flags=re.MULTILINE)}

    def wait_until(self, holds, seconds: float = 20.0) -> dict[str, float]:
        """Look at the numbers until `holds` of them; the last that were seen."""
        deadline = time.monotonic() + seconds
        while not holds(gauges := self.gauges()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return gauges

    def wait_until_idle(self) -> None:
        """Every text has ended and every page is free."""
        gauges = self.wait_until(lambda seen: at_rest(seen))
        assert at_rest(gauges), gauges


def at_rest(gauges: dict[str, float]) -> bool:
    free = gauges["whimbrel_engine_free_pages"] == gauges["whimbrel_engine_pages"]
    return free and gauges["whimbrel_engine_running"] == gauges["whimbrel_engine_waiting"] == 0


@contextmanager
def serving(
    model: Path, *options: str, key: str | None = KEY, files: int | None = None, log: IO[str] | None = None
) -> Iterator[Running]:
    """`whimbrel serve` at a free port, ended when the block is left.

    `files` limits its open files; its standard error goes to `log` where one is given.
    """
    limited = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash"] if files else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"WHIMBREL_API_KEY": key} if key else {})
    words = [
        *limited,
        sys.executable,
        "-m",
        "whimbrel",
        "serve",
        str(model),
        "--port=0",
        "--device=cpu",
        "--pages=2048",
        *options,
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        said = process.stdout.readline()
        found = re.search(r"http://\S+", said)
        assert found, f"no address in {said!r}"
        yield Running(found.group(), process, key)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
