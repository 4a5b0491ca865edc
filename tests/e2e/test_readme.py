"""Every command of the README runs, in order, in a directory with the files of a clone.

A fenced `bash` block is a list of commands. `whimbrel` lines run with the arguments of SHORTER added, so that each
takes seconds; servers run until their page has been loaded; `make` lines must name existing targets; `pip` lines are
not run. Any other command fails the test, so that the page has no untested commands. Each command is its own test, in
the order of the page; the `python` blocks run last, on the output of the commands.
"""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest
from tests.support.documentation import code_blocks
from tests.support.finetuning import reversal_task, save_small_chat_model, write_chats

ROOT = Path(__file__).resolve().parents[2]
SHORTER = {
    "whimbrel quickstart": "--minutes=0.02 --depth=1",
    "whimbrel train": "--train.steps=4",
    "whimbrel finetune": "--train.steps=2 --train.micro_batch=2",
    "whimbrel generate": "--max-new-tokens=8",
}
SERVERS = {"whimbrel serve", "whimbrel watch"}


def commands() -> list[str]:
    lines = [line for block in code_blocks("README.md", "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).strip())]


def run(command: str | list[str], folder: Path) -> None:
    arguments = ["bash", "-euo", "pipefail", "-c", command] if isinstance(command, str) else command
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        arguments, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def open_page(command: str, folder: Path) -> None:
    """Start a server on a free port, load the page that it prints, and stop it."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    arguments = ["bash", "-c", f"exec {command} --port=0"]
    with subprocess.Popen(
        arguments,
        cwd=folder,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            links = (re.search(r"http://\S+?/?(?=#|\s)", line) for line in process.stdout)
            link = next((found.group() for found in links if found), None)
            assert link is not None, f"{command}: no link in its output"
            with urllib.request.urlopen(link, timeout=60) as response:
                assert b"<title>Whimbrel" in response.read()
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with texts, chats, a model and a `whimbrel` program that runs the package under test."""
    folder = tmp_path_factory.mktemp("clone")
    program = folder / "bin" / "whimbrel"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m whimbrel "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    text = gzip.decompress((ROOT / "corpora" / "tinyshakespeare.txt.gz").read_bytes()).decode()
    (folder / "my-texts").mkdir()
    for index in range(3):
        part = text[index * 100_000 : (index + 1) * 100_000]
        (folder / "my-texts" / f"{index}.txt").write_text(part, encoding="utf-8")
    save_small_chat_model(folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct")
    chats, held_out = reversal_task()
    write_chats(folder / "chats.jsonl", chats)
    write_chats(folder / "held-out.jsonl", held_out[:4])
    return folder


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("whimbrel ")])
def test_commands_run_in_order(clone: Path, command: str):
    verb = " ".join(command.split()[:2])
    if verb in SERVERS:
        open_page(command, clone)
        return
    run(f"{command} {SHORTER.get(verb, '')}", clone)


@pytest.mark.parametrize("block", code_blocks("README.md", "python"))
def test_python_examples_run_on_the_output_of_the_commands(clone: Path, block: str):
    run([sys.executable, "-c", block], clone)


def test_every_command_is_tested():
    assert [command for command in commands() if command.split()[0] not in {"whimbrel", "make", "pip"}] == []


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("make ")])
def test_make_targets_exist(command: str):
    run(f"{command} --dry-run", ROOT)


def test_extras_exist():
    groups = re.findall(r"'\.\[([\w,-]+)\]'", (ROOT / "README.md").read_text(encoding="utf-8"))
    named = {extra for group in groups for extra in group.split(",")}
    assert named <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert named


def test_page_shows_make_demo_and_make_test():
    assert "make demo" in commands()
    assert "make test" in commands()


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
