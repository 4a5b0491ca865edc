"""The programs of docs/trainer.md, run as a reader would; the first one also with `transformers`' own trainer."""

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
def place(root: Path, tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    """A folder with what the programs read."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "corpora").symlink_to(root / "corpora")
    tokenizer = train_tokenizer([shakespeare[:60_000]], 1024)
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")
    (folder / "text.txt").write_text(shakespeare[:60_000])
    source = [str(folder / "text.txt")]
    prepare(source, folder / "shards", tokenizer, name="tiny", separator="\n\n", val_tokens=2000)
    return folder


def run(program: str, place: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_transformers_script_runs_with_another_import(programs: list[str], place: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    program = programs[0]
    assert program.count(OURS) == 1
    ours = float(run(program, place).splitlines()[-1])
    theirs = program.replace(OURS, THEIRS).replace("runs/hf", "runs/theirs")
    other = float(run(theirs, place).splitlines()[-1])
    assert 0 < ours < 6.6  # of log(1024) = 6.9 before the first step
    assert ours == pytest.approx(other, abs=0.3)  # another order of the data; theirs weighs batches, ours targets
    assert list(list_checkpoints(place / "runs" / "hf")) == [10, 20, 30]
    for folder in (place / "runs/hf-model", place / "runs/hf/checkpoints/step-00000030/model"):
        assert AutoModelForCausalLM.from_pretrained(folder).config.n_layer == 2
        assert len(AutoTokenizer.from_pretrained(folder)) == 1024


def test_custom_objective(programs: list[str], place: Path) -> None:
    run(programs[1], place)
    assert all(line["z"] > 0 for line in read_log(place / "runs/zloss/log.jsonl") if line["kind"] == "step")


def test_shards_and_gpt(programs: list[str], place: Path) -> None:
    run(programs[2], place)
    newest = list_checkpoints(place / "runs" / "shards")[20]
    assert load_model(newest / "model").config.num_layers == 2
    losses = [line["loss"] for line in read_log(place / "runs/shards/log.jsonl") if line["kind"] == "step"]
    assert losses[-1] < losses[0] - 0.5


def test_a_plain_module(programs: list[str], place: Path) -> None:
    last = run(programs[3], place).splitlines()[-1]
    assert "StopRequest(callback='StopWhenGood', event='on_train_metrics', kind='stop')" in last
