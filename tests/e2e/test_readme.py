"""Every command of the README runs, in order, in a folder that holds what a clone holds.

A fenced `bash` block is a list of commands. `whimbrel` lines run as they stand, with the settings of SHORTER added so
that each takes seconds; `make` lines must name targets that exist; `pip` lines install the package that is
under test here and are only read. Any other command fails the test, so that the page holds nothing that is not tried.
Each command is a test of its own, in the page's order; the `python` blocks run last, on what the commands made.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORTER = {
    "whimbrel train": "--train.steps=4",
    "whimbrel generate": "--max-new-tokens=8",
}


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).strip())]


def run(command: str | list[str], folder: Path) -> None:
    words = ["bash", "-euo", "pipefail", "-c", command] if isinstance(command, str) else command
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands read: the recipes and the bundled corpus; `whimbrel` is the one under test."""
    folder = tmp_path_factory.mktemp("clone")
    program = folder / "bin" / "whimbrel"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m whimbrel "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    for name in ("configs", "corpora"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("whimbrel ")])
def test_the_commands_run_in_order(clone: Path, command: str):
    verb = " ".join(command.split()[:2])
    run(f"{command} {SHORTER.get(verb, '')}", clone)


@pytest.mark.parametrize("block", blocks("python"))
def test_the_python_runs_on_what_the_commands_made(clone: Path, block: str):
    run([sys.executable, "-c", block], clone)


def test_every_command_is_of_a_kind_that_is_tried():
    assert [command for command in commands() if command.split()[0] not in {"whimbrel", "make", "pip"}] == []


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("make ")])
def test_the_make_targets_exist(command: str):
    run(f"{command} --dry-run", ROOT)


def test_the_extras_that_the_page_names_exist():
    named = set(re.findall(r"'\.\[(\w+)\]'", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert named


def test_the_first_screen_shows_both_commands():
    assert "make demo" in commands()
    assert "make test" in commands()


def test_ci_runs_the_test_command_of_the_page():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
