"""`whimbrel memory`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

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


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["memory", *words])
    streams = capsys.readouterr()
    assert (ended.value.code or 0) == code, streams
    return streams.err if code else streams.out


def table(text: str, head: str) -> list[list[str]]:
    """The rows of the table whose first head is this."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head))
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[start:]]
    return rows[: rows.index([""])] if [""] in rows else rows


def test_optimizers_are_compared_with_the_runs_own_first(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, recipe, "--device", "cuda")
    assert text.startswith("Device: cuda, 3 x 2 sequences of 64 tokens per step")
    heads, *rows = table(text, "optimizer")
    assert heads == ["optimizer", "weights", "gradients", "state", "activations", "temporary", "peak", "peak during"]
    assert [row[0] for row in rows] == ["muon", *(name for name in optimizer_names() if name != "muon")]
    assert all(len(row) == len(heads) for row in rows)
    assert not Path("run").exists()


def test_int8_weights_limit_the_optimizers(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, *rows = table(said(capsys, recipe, "--train.weights=int8", "--optim.name=adamw8bit"), "optimizer")
    assert {row[0] for row in rows} == set(optimizer_names()) - {"galore", "muon"}


def test_json_output_follows_overrides(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    def peak(*words: str) -> dict[str, Any]:
        own, other = json.loads(said(capsys, recipe, "--device=cpu", "--json", "--optimizer", "adamw", *words))
        assert (own["optimizer"], other["optimizer"]) == ("muon", "adamw")
        assert own["states"] < other["states"] == sum(row["state"] for row in other["parameters"])
        return dict(own)

    plain, more = peak(), peak("--train.micro_batch=8")
    assert sum(plain["at_peak"].values()) == plain["peak"]
    assert more["activations"] > 2 * plain["activations"]
    assert more["weights"] == plain["weights"]


def test_parameters_are_listed_with_their_optimizer(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--optim.name=galore_warm", "--optim.rank=8", "--optimizer=galore_warm", "--parameters")
    heads, *rows = table(said(capsys, recipe, *settings), "parameter")
    assert heads == ["parameter", "tensors", "shape", "dtype", "optimizer", "weights", "state"]
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["transformer.h.*.attn.c_proj.weight"][:4] == ["2", "64 x 64", "float32", "warm rank 8, adamw"]
    assert by_name["transformer.wte.weight"][3] == "adamw"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--device", "tpu"], "expected --device cuda or cpu, got tpu"),
        (["--optimizer", "adam"], "did you mean 'adamw'?"),
        (["--train.micro_bath=2"], "did you mean 'micro_batch'?"),
        (["--train.optimizer_in_backward=true"], "does not work with 3 micro-batches a step"),
    ],
)
def test_bad_options_give_one_line(
    recipe: str, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    text = said(capsys, recipe, *words, code=2)
    assert reason in text
    assert len(text.splitlines()) == 1
