"""The examples of docs/trainer.md run as shown; the first one also with the Trainer of `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.documentation import code_blocks, run_python
from tests.support.runs import prepare_text

from whimbrel.checkpoint import list_checkpoints
from whimbrel.model_io import load_model
from whimbrel.train import read_log

OURS, THEIRS = "from whimbrel.train import Trainer", "from transformers import Trainer"


@pytest.fixture(scope="module")
def programs() -> list[str]:
    found = code_blocks("docs/trainer.md", "python")
    assert len(found) == 6
    return found


@pytest.fixture(scope="module")
def directory(root: Path, tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    """A directory with the files that the examples read."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "corpora").symlink_to(root / "corpora")
    tokenizer = prepare_text(folder, shakespeare[:60_000], vocab_size=1024, val_tokens=2000)
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")
    return folder


def test_transformers_script_runs_after_changing_the_import(programs: list[str], directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    program = programs[0]
    assert program.count(OURS) == 1
    ours = float(run_python(program, directory).splitlines()[-1])
    theirs = program.replace(OURS, THEIRS).replace("runs/hf", "runs/theirs")
    other = float(run_python(theirs, directory).splitlines()[-1])
    assert 0 < ours < 6.6  # log(1024) = 6.9 before the first step
    assert ours == pytest.approx(
        other, abs=0.3
    )  # different data order; transformers averages over batches, ours over targets
    assert list(list_checkpoints(directory / "runs" / "hf")) == [10, 20, 30]
    for folder in (directory / "runs/hf-model", directory / "runs/hf/checkpoints/step-00000030/model"):
        assert AutoModelForCausalLM.from_pretrained(folder).config.n_layer == 2
        assert len(AutoTokenizer.from_pretrained(folder)) == 1024


@pytest.mark.parametrize(
    ("index", "run", "metric"), [(1, "focal", "accuracy"), (2, "zloss", "z"), (3, "dpo", "rewards/accuracies")]
)
def test_metrics_of_objectives_are_logged(
    programs: list[str], directory: Path, index: int, run: str, metric: str
) -> None:
    run_python(programs[index], directory)
    steps = [line for line in read_log(directory / "runs" / run / "log.jsonl") if line["kind"] == "step"]
    assert len(steps) == 5
    assert all(line[metric] >= 0 for line in steps)


def test_gpt_trains_on_shards(programs: list[str], directory: Path) -> None:
    run_python(programs[4], directory)
    newest = list_checkpoints(directory / "runs" / "shards")[20]
    assert load_model(newest / "model").config.num_layers == 2
    losses = [line["loss"] for line in read_log(directory / "runs/shards/log.jsonl") if line["kind"] == "step"]
    assert losses[-1] < losses[0] - 0.5


def test_custom_module_trains_and_stops_early(programs: list[str], directory: Path) -> None:
    last = run_python(programs[5], directory).splitlines()[-1]
    assert "StopRequest(callback='StopWhenGood', event='on_train_metrics', kind='stop')" in last
