"""The commands and examples of docs/generation.md run as shown, on a tiny run; its table is complete."""

from __future__ import annotations

import dataclasses
import io
import re
import runpy
import shlex
from pathlib import Path

import pytest
from tests.support.commands import whimbrel
from tests.support.documentation import code_blocks, read_page
from tests.support.runs import train_demo_run

from whimbrel.inference import SamplingParams


@pytest.fixture(scope="module")
def page() -> str:
    return read_page("docs/generation.md")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    """A directory with a run, as the commands expect it."""
    folder = tmp_path_factory.mktemp("generation")
    train_demo_run(folder, shakespeare[:40_000], context_length=64)
    return folder


def commands(page: str) -> list[str]:
    return re.findall(r"^\$ (whimbrel .*)$", page, re.MULTILINE)


def test_page_has_every_command(page):
    assert len(commands(page)) == 7


@pytest.mark.parametrize("number", range(7))
def test_command_runs(page, directory, number, monkeypatch, capsys):
    monkeypatch.chdir(directory)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who art thou?\n/reset\nAnd thou?\n"))
    arguments = shlex.split(commands(page)[number])[1:]
    if "--max-new-tokens" not in arguments:
        arguments += ["--max-new-tokens", "8"]
    code = whimbrel(*arguments, "--device", "cpu")
    printed = capsys.readouterr()
    assert code == 0, printed.err
    if arguments[0] == "generate":
        texts = 3 if "--n" in arguments else 1
        assert printed.out.startswith("ROMEO:")
        assert len(re.findall(r"^ROMEO:", printed.out, re.MULTILINE)) >= texts
    else:
        assert printed.err.startswith("the model has no chat template")


@pytest.mark.parametrize(
    ("number", "printed"),
    [
        (0, r"(stop|length) \d+ 3\n(stop|length) \d+ 3\n"),
        (1, r"(-\d\.\d+ \[[\d, ]+\]\n){2}"),
        (2, r""),
        (3, r"[\s\S]*2\n"),
    ],
)
def test_example_prints_the_expected_output(tmp_path, number, printed, capsys):
    programs = code_blocks("docs/generation.md", "python")
    assert len(programs) == 4
    (tmp_path / "program.py").write_text(programs[number])
    runpy.run_path(str(tmp_path / "program.py"))
    assert re.fullmatch(printed, capsys.readouterr().out)


def test_table_lists_every_sampling_parameter(page):
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `.*? \|", page, re.MULTILINE)))
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(SamplingParams))
