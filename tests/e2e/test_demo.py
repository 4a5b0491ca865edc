"""`make demo` keeps its promise: a trained model, a picture, readable verse, and the command to go on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whimbrel.train import read_log


@pytest.mark.timeout(600)
def test_the_demo_trains_draws_and_writes_verse(root: Path, tmp_path: Path, shakespeare: str) -> None:
    for name in ("configs", "corpora", "scripts"):
        shutil.copytree(root / name, tmp_path / name)
    program = tmp_path / "bin" / "whimbrel"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m whimbrel "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [tmp_path / "scripts" / "demo"], env=environment, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

    run = tmp_path / "runs" / "demo"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    losses = [line["loss"] for line in read_log(run / "log.jsonl") if line["kind"] == "validation"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 4.5

    generated = re.search(r"\$ whimbrel generate [^\n]*\n(.*?)\n\nGo on with", done.stdout, re.S)
    assert generated is not None
    known = set(re.findall(r"[A-Za-z']+", shakespeare))
    words = re.findall(r"[A-Za-z']+", generated[1])
    assert len(words) > 80
    assert sum(word in known for word in words) / len(words) >= 0.9
    assert "whimbrel generate runs/demo" in done.stdout.rsplit("Go on with", 1)[1]
