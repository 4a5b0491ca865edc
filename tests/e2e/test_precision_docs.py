"""The examples, settings and commands of docs/precision.md work as shown, on a tiny run; its tables are complete."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from tests.support.commands import whimbrel
from tests.support.documentation import code_blocks, read_page, run_python
from tests.support.runs import train_demo_run

from whimbrel.precision import FORMATS, RECIPES
from whimbrel.train.config import build_run_config

PAGE = "docs/precision.md"
MODEL = {"context_length": 32, "vocab_size": 300, "num_layers": 1, "embd_size": 128, "num_heads": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    """A directory with a run, as the commands expect it."""
    folder = tmp_path_factory.mktemp("precision")
    train_demo_run(folder, shakespeare[:40_000], context_length=32)
    return folder


def test_example_prints_the_output_shown(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    (program,), (shown,) = code_blocks(PAGE, "python"), code_blocks(PAGE, "text")
    assert run_python(program, tmp_path) == shown


def test_settings_are_valid() -> None:
    (table,) = code_blocks(PAGE, "toml")
    settings = tomllib.loads(table)["train"] | {"steps": 1}
    others = [f"{name} = {value}" for name, value in re.findall(r'or: (\w+) = ("\S+?")', table)]
    assert len(others) == 2
    for extra in ("", *others):
        kept = {name: value for name, value in settings.items() if not extra or name != "fp8_recipe"}
        build_run_config(
            {"output_dir": "x", "data": {"path": "x"}, "model": MODEL, "train": kept | tomllib.loads(extra)}
        )


def test_commands_run_in_order(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    for command in [line for block in code_blocks(PAGE, "bash") for line in block.splitlines()]:
        program, *arguments = shlex.split(command)
        assert program == "whimbrel"
        assert whimbrel(*arguments) == 0, command
    for name in ("demo-int8", "demo-unquantized"):
        assert (directory / "models" / name / "model.safetensors").is_file()


def test_tables_list_every_recipe_and_format() -> None:
    sections = {part.partition("\n")[0]: part for part in read_page(PAGE).split("\n## ")}
    for title, named in (("Recipes", RECIPES), ("Weight formats", FORMATS)):
        first = [row.split("|")[1] for row in sections[title].splitlines() if row.startswith("| `")]
        assert {name for cell in first for name in re.findall(r"`(\S+?)`", cell)} == set(named)
