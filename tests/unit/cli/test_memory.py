"""`whimbrel memory`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.models import save_with_adapters

from whimbrel.cli.main import main
from whimbrel.train.memory import optimizer_names

RECIPE = """
output_dir = "run"
[model]
context_length = 64
vocab_size = 300
num_layers = 2
embd_size = 64
num_heads = 2
[data]
path = "nowhere"
[train]
steps = 6
micro_batch = 2
accumulation = 3
[optim]
name = "muon"
"""


@pytest.fixture
def recipe(workdir: Path) -> str:
    (workdir / "run.toml").write_text(RECIPE)
    return "run.toml"


def run_memory(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["memory", *arguments])
    streams = capsys.readouterr()
    assert (ended.value.code or 0) == code, streams
    return streams.err if code else streams.out


def table(text: str, head: str) -> list[list[str]]:
    """The rows of the table whose first column has this name."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head))
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[start:]]
    return rows[: rows.index([""])] if [""] in rows else rows


def test_each_warning_is_shown_once(
    recipe: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run_memory(capsys, recipe, "--device", "cpu")
    assert caplog.text.count("is the full rank of") == 1


def test_each_warning_is_shown_once_with_adapters(
    workdir: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    save_with_adapters(workdir, [])
    tables = ('[model]\npath = "base"', '[data]\npath = "nowhere.jsonl"', "[lora]\nrank = 4", "[train]\nsteps = 6")
    (workdir / "run.toml").write_text("\n".join(('output_dir = "run"', *tables)))
    run_memory(capsys, "run.toml", "--device", "cpu")
    assert caplog.text.count("is the full rank of") == 1


def test_optimizers_are_compared_starting_with_that_of_the_run(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run_memory(capsys, recipe, "--device", "cuda")
    assert text.startswith("Device: cuda, 3 x 2 sequences of 64 tokens per step")
    columns, *rows = table(text, "optimizer")
    assert columns == ["optimizer", "weights", "gradients", "state", "activations", "temporary", "peak", "peak during"]
    assert [row[0] for row in rows] == ["muon", *(name for name in optimizer_names() if name != "muon")]
    assert all(len(row) == len(columns) for row in rows)
    assert not Path("run").exists()


def test_int8_weights_limit_the_optimizers(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, *rows = table(run_memory(capsys, recipe, "--train.weight_dtype=int8", "--optim.name=adamw8bit"), "optimizer")
    assert {row[0] for row in rows} == set(optimizer_names()) - {"galore", "muon"}


def test_json_output_follows_overrides(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    def peak(*arguments: str) -> dict[str, Any]:
        own, other = json.loads(
            run_memory(capsys, recipe, "--device=cpu", "--json", "--optimizer", "adamw", *arguments)
        )
        assert (own["optimizer"], other["optimizer"]) == ("muon", "adamw")
        assert own["states"] < other["states"] == sum(row["state_bytes"] for row in other["parameters"])
        return dict(own)

    small, more = peak(), peak("--train.micro_batch=8")
    assert sum(small["at_peak"].values()) == small["peak"]
    assert more["activations"] > 2 * small["activations"]
    assert more["weights"] == small["weights"]


def test_parameters_are_listed_with_their_optimizer(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--optim.name=galore_warm", "--optim.rank=8", "--optimizer=galore_warm", "--parameters")
    columns, *rows = table(run_memory(capsys, recipe, *settings), "parameter")
    assert columns == ["parameter", "tensors", "shape", "dtype", "optimizer", "weights", "state"]
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["transformer.h.*.attn.c_proj.weight"][:4] == ["2", "64 x 64", "float32", "warm rank 8, adamw"]
    assert by_name["transformer.wte.weight"][3] == "adamw"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--nproc", "0"], "expected --nproc of at least 1, got 0"),
        (["--device-memory", "-1"], "expected --device-memory > 0, got -1"),
        (["--nproc", "3", "--train.accumulation=none", "--train.tokens_per_step=128"], "x ranks = 2 x 64 x 3"),
        (["--device", "tpu"], "expected --device cuda or cpu, got tpu"),
        (["--optimizer", "adam"], "did you mean 'adamw'?"),
        (["--train.micro_bath=2"], "did you mean 'train.micro_batch'?"),
        (["--train.optimizer_in_backward=true"], "does not work with 3 micro-batches per step"),
    ],
)
def test_invalid_options_are_one_error_line(
    recipe: str, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    text = run_memory(capsys, recipe, *arguments, code=2)
    assert reason in text
    assert len(text.splitlines()) == 1
