"""The examples, settings and commands of docs/precision.md work as shown, on a tiny run; its tables are complete."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from whimbrel.cli.main import main
from whimbrel.data.prepare import prepare
from whimbrel.precision import FORMATS, RECIPES
from whimbrel.tokenization import train_tokenizer
from whimbrel.train import train
from whimbrel.train.config import build_run_config

MODEL = {"context_length": 32, "vocab_size": 300, "num_layers": 1, "embd_size": 128, "num_heads": 4}


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "precision.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    """A directory with a run, as the commands expect it."""
    folder = tmp_path_factory.mktemp("precision")
    (folder / "text.txt").write_text(shakespeare[:40_000])
    tokenizer = train_tokenizer([shakespeare[:40_000]], 300)
    prepare([str(folder / "text.txt")], folder / "shards", tokenizer, name="tiny", separator="\n\n", val_tokens=1500)
    table = {
        "output_dir": str(folder / "runs" / "demo"), "data": {"path": str(folder / "shards")}, "model": MODEL,
        "train": {"steps": 2, "tokens_per_step": 128, "micro_batch": 4, "device": "cpu"},
    }  # fmt: skip
    train(build_run_config(table))
    return folder


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stderr}"
    return done.stdout


def test_example_prints_the_output_shown(page: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    (program,), (shown,) = blocks(page, "python"), blocks(page, "text")
    assert run(["-c", program], tmp_path) == shown


def test_settings_are_valid(page: str) -> None:
    (table,) = blocks(page, "toml")
    settings = tomllib.loads(table)["train"] | {"steps": 1}
    others = [f"{name} = {value}" for name, value in re.findall(r'or: (\w+) = ("\S+?")', table)]
    assert len(others) == 2
    for extra in ("", *others):
        kept = {name: value for name, value in settings.items() if not extra or name != "fp8_recipe"}
        build_run_config(
            {"output_dir": "x", "data": {"path": "x"}, "model": MODEL, "train": kept | tomllib.loads(extra)}
        )


def test_commands_run_in_order(page: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    for command in [line for block in blocks(page, "bash") for line in block.splitlines()]:
        name, *words = shlex.split(command)
        assert name == "whimbrel"
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code, command
    for made in ("demo-int8", "demo-plain"):
        assert (directory / "models" / made / "model.safetensors").is_file()


def test_tables_list_every_recipe_and_format(page: str) -> None:
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    for title, named in (("Recipes", RECIPES), ("Weight formats", FORMATS)):
        first = [row.split("|")[1] for row in sections[title].splitlines() if row.startswith("| `")]
        assert {name for cell in first for name in re.findall(r"`(\S+?)`", cell)} == set(named)
