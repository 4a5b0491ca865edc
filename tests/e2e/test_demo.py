"""`make demo` trains a model on the bundled corpus, evaluates it, generates text and plots its loss."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whimbrel.train import read_log

SHORT = ("--minutes", "0.02", "--depth", "1")


@pytest.fixture(scope="module")
def clone(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the script reads and a `whimbrel` program that runs the package under test."""
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(root / "scripts", folder / "scripts")
    program = folder / "bin" / "whimbrel"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m whimbrel "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return folder


def run(clone: Path, *command: str | Path) -> str:
    environment = {**os.environ, "PATH": f"{clone / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_demo_trains_evaluates_and_plots(clone: Path) -> None:
    out = run(clone, clone / "scripts" / "demo", *SHORT)
    losses = [line["loss"] for line in read_log(clone / "runs/demo/log.jsonl") if line["kind"] == "step"]
    held_out = re.search(r"Held-out text: loss ([\d.]+) per token", out)
    assert held_out is not None
    assert float(held_out[1]) < losses[0]
    sample = re.search(r"\nSample:\n(.*?)\n\nDone in ", out, re.S)
    assert sample is not None
    assert len(sample[1].split()) > 20
    assert "whimbrel serve runs/demo" in out
    assert (clone / "runs/demo/loss.png").read_bytes().startswith(b"\x89PNG")


def test_second_demo_keeps_the_finished_run(clone: Path) -> None:
    log = (clone / "runs/demo/log.jsonl").read_bytes()
    assert "Resuming runs/demo" in run(clone, clone / "scripts" / "demo", *SHORT)
    assert (clone / "runs/demo/log.jsonl").read_bytes() == log
