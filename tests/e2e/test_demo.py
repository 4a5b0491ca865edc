"""`make demo` trains a model, plots its loss and generates readable text. One test per step."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whimbrel.train import read_log


@pytest.fixture(scope="module")
def clone(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the script reads and a `whimbrel` program that runs the package under test."""
    folder = tmp_path_factory.mktemp("demo")
    for name in ("corpora", "scripts"):
        shutil.copytree(root / name, folder / name)
    program = folder / "bin" / "whimbrel"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m whimbrel "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return folder


def demo(clone: Path, *steps: str) -> str:
    environment = {**os.environ, "PATH": f"{clone / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([clone / "scripts" / "demo", *steps], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_demo_trains_a_tokenizer_and_writes_shards(clone: Path) -> None:
    assert "train:" in demo(clone, "tokenizer", "prepare")


def test_training_lowers_the_validation_loss(clone: Path) -> None:
    demo(clone, "train")
    losses = [line["loss"] for line in read_log(clone / "runs/demo/log.jsonl") if line["kind"] == "validation"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 4.5


def test_loss_curve_is_a_png_file(clone: Path) -> None:
    demo(clone, "plot")
    assert (clone / "runs/demo/loss.png").read_bytes().startswith(b"\x89PNG")


def test_generated_text_consists_of_known_words(clone: Path, shakespeare: str) -> None:
    out = demo(clone, "generate")
    generated = re.search(r"\$ whimbrel generate [^\n]*\n(.*?)\n\nTry your own", out, re.S)
    assert generated is not None
    known = set(re.findall(r"[A-Za-z']+", shakespeare))
    words = re.findall(r"[A-Za-z']+", generated[1])
    assert len(words) > 80
    assert sum(word in known for word in words) / len(words) >= 0.9
    assert "whimbrel generate runs/demo" in out.rsplit("Try your own", 1)[1]


def test_unknown_step_is_rejected(clone: Path) -> None:
    with pytest.raises(AssertionError, match="unknown step 'trian'"):
        demo(clone, "trian")
