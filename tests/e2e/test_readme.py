"""Every command of the README runs, in order, in a folder that holds what a clone holds.

A fenced `bash` block is a list of commands. `whimbrel` lines run as they stand, with the settings of SHORTER added so
that the whole page takes seconds; `make` lines must name targets that exist; `pip` lines install the package that is
under test here and are only read. Any other command fails the test, so that the page holds nothing that is not tried.
The `python` blocks run last, on what the commands made.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORTER = {
    "whimbrel train": ["--train.steps=4"],
    "whimbrel generate": ["--max-new-tokens=8"],
}


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands read: the recipes and the bundled corpus."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "corpora"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


def test_the_commands_run_in_order_and_then_the_python(clone: Path):
    for words in commands():
        if words[0] == "whimbrel":
            extra = SHORTER.get(" ".join(words[:2]), [])
            run([sys.executable, "-m", *words, *extra], clone)
    for block in blocks("python"):
        run([sys.executable, "-c", block], clone)


def test_every_command_is_of_a_kind_that_is_tried():
    strange = [shlex.join(words) for words in commands() if words[0] not in {"whimbrel", "make", "pip"}]
    assert strange == []


@pytest.mark.parametrize("target", [words[1] for words in commands() if words[0] == "make"])
def test_the_make_targets_exist(target: str):
    run(["make", "--dry-run", target], ROOT)


def test_the_extras_that_the_page_names_exist():
    named = set(re.findall(r"'\.\[(\w+)\]'", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert named


def test_the_first_screen_shows_both_commands():
    assert ["make", "demo"] in commands()
    assert ["make", "test"] in commands()


def test_ci_runs_the_test_command_of_the_page():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
