"""`whimbrel serve` with a low open-file limit."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.serving import httpx, serving


def test_more_idle_connections_than_open_files_do_not_block_new_ones(tiny: Path, tmp_path: Path):
    with (tmp_path / "log").open("w+") as log, serving(tiny, key=None, files=128, log=log) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        with ExitStack() as idle:
            for _ in range(200):
                idle.enter_context(socket.create_connection((host, int(port)), timeout=30))
            for _ in range(3):
                assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
        log.seek(0)
        log_text = log.read()
        assert "connections are open: closing idle ones" in log_text
        assert "Traceback" not in log_text
        assert len(log_text.splitlines()) < 20
