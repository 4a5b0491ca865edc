"""The examples of docs/trainer.md run as shown; the first one also with the Trainer of `transformers`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from whimbrel.checkpoint import list_checkpoints
from whimbrel.data.prepare import prepare
from whimbrel.model_io import load_model
from whimbrel.tokenization import train_tokenizer
from whimbrel.train import read_log

OURS, THEIRS = "from whimbrel.train import Trainer", "from transformers import Trainer"


@pytest.fixture(scope="module")
def programs(root: Path) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (root / "docs" / "trainer.md").read_text(), re.DOTALL)
    assert len(found) == 4
    return found


@pytest.fixture(scope="module")
def directory(root: Path, tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    """A directory with the files that the examples read."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "corpora").symlink_to(root / "corpora")
    tokenizer = train_tokenizer([shakespeare[:60_000]], 1024)
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")
    (folder / "text.txt").write_text(shakespeare[:60_000])
    source = [str(folder / "text.txt")]
    prepare(source, folder / "shards", tokenizer, name="tiny", separator="\n\n", val_tokens=2000)
    return folder


def run(program: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transformers_script_runs_after_changing_the_import(programs: list[str], directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    program = programs[0]
    assert program.count(OURS) == 1
    ours = float(run(program, directory).splitlines()[-1])
    theirs = program.replace(OURS, THEIRS).replace("runs/hf", "runs/theirs")
    other = float(run(theirs, directory).splitlines()[-1])
    assert 0 < ours < 6.6  # log(1024) = 6.9 before the first step
    assert ours == pytest.approx(
        other, abs=0.3
    )  # different data order; transformers averages over batches, ours over targets
    assert list(list_checkpoints(directory / "runs" / "hf")) == [10, 20, 30]
    for folder in (directory / "runs/hf-model", directory / "runs/hf/checkpoints/step-00000030/model"):
        assert AutoModelForCausalLM.from_pretrained(folder).config.n_layer == 2
        assert len(AutoTokenizer.from_pretrained(folder)) == 1024


def test_custom_objective_is_logged(programs: list[str], directory: Path) -> None:
    run(programs[1], directory)
    assert all(line["z"] > 0 for line in read_log(directory / "runs/zloss/log.jsonl") if line["kind"] == "step")


def test_gpt_trains_on_shards(programs: list[str], directory: Path) -> None:
    run(programs[2], directory)
    newest = list_checkpoints(directory / "runs" / "shards")[20]
    assert load_model(newest / "model").config.num_layers == 2
    losses = [line["loss"] for line in read_log(directory / "runs/shards/log.jsonl") if line["kind"] == "step"]
    assert losses[-1] < losses[0] - 0.5


def test_custom_module_trains_and_stops_early(programs: list[str], directory: Path) -> None:
    last = run(programs[3], directory).splitlines()[-1]
    assert "StopRequest(callback='StopWhenGood', event='on_train_metrics', kind='stop')" in last
