"""The commands and examples of docs/generation.md run as shown, on a tiny run; its table is complete."""

from __future__ import annotations

import dataclasses
import io
import re
import runpy
import shlex
from pathlib import Path

import pytest

from whimbrel.cli.main import main
from whimbrel.data.prepare import prepare
from whimbrel.inference import SamplingParams
from whimbrel.tokenization import train_tokenizer
from whimbrel.train import train
from whimbrel.train.config import build_run_config


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "generation.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    """A directory with a run, as the commands expect it."""
    folder = tmp_path_factory.mktemp("generation")
    (folder / "text.txt").write_text(shakespeare[:40_000])
    tokenizer = train_tokenizer([shakespeare[:40_000]], 300)
    prepare([str(folder / "text.txt")], folder / "shards", tokenizer, name="tiny", separator="\n\n", val_tokens=1500)
    shape = {"context_length": 64, "vocab_size": 300, "num_layers": 1, "embd_size": 128, "num_heads": 4}
    table = {
        "output_dir": str(folder / "runs" / "demo"), "data": {"path": str(folder / "shards")}, "model": shape,
        "train": {"steps": 2, "tokens_per_step": 256, "micro_batch": 4, "device": "cpu"},
    }  # fmt: skip
    train(build_run_config(table))
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
    with pytest.raises(SystemExit) as done:
        main([*arguments, "--device", "cpu"])
    printed = capsys.readouterr()
    assert done.value.code == 0, printed.err
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
def test_example_prints_the_expected_output(page, tmp_path, number, printed, capsys):
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) == 4
    (tmp_path / "program.py").write_text(programs[number])
    runpy.run_path(str(tmp_path / "program.py"))
    assert re.fullmatch(printed, capsys.readouterr().out)


def test_table_lists_every_sampling_parameter(page):
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `.*? \|", page, re.MULTILINE)))
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(SamplingParams))
