"""`whimbrel watch`, and the live page of `whimbrel train`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.commands import whimbrel

from whimbrel.cli.watch import LivePage
from whimbrel.train.run_directory import log_line


@pytest.fixture
def run(workdir: Path) -> Path:
    (workdir / "run").mkdir()
    (workdir / "run" / "log.jsonl").write_text(log_line("step", 1, {"total": 2, "loss": 3.0, "tokens": 8}))
    return workdir / "run"


def begin(page: LivePage, run: Path, *, first_rank: bool = True) -> None:
    state = SimpleNamespace(is_world_process_zero=first_rank)
    page.on_train_begin(state=state, trainer=SimpleNamespace(config=SimpleNamespace(output_dir=run)))


def test_missing_directory_is_one_line(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    assert whimbrel("watch", "nope") == 2
    assert "no such directory: nope" in capsys.readouterr().err


def test_watch_does_not_import_torch(run: Path) -> None:
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    code = "import sys, whimbrel.server.run_page, whimbrel.server.http; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_of_a_run_lives_as_long_as_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    httpx = pytest.importorskip("httpx", reason="needs the package 'httpx'")
    if not LivePage.is_available():
        pytest.skip("needs the extra `serve`")
    page = LivePage()
    begin(page, run, first_rank=False)
    assert page._process is None
    begin(page, run)
    match = re.fullmatch(r"Live page: (http://127\.0\.0\.1:\d+)/#key=(\S+)\n", capsys.readouterr().out)
    assert match
    reply = httpx.get(f"{match[1]}/api/runs", headers={"Authorization": f"Bearer {match[2]}"}, timeout=60)
    assert [row["loss"] for row in reply.json()["runs"]] == [3.0]
    assert httpx.get(f"{match[1]}/api/runs", timeout=60).status_code == 401
    page.on_train_end()
    assert page._process is not None
    assert page._process.wait(60) == 0
