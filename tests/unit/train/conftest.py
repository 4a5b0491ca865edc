"""A small real corpus as shards, and a run on it that takes a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from whimbrel.data.prepare import prepare
from whimbrel.text import train_tokenizer
from whimbrel.train import RunConfig
from whimbrel.train.config import run_config

MakeRun = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    """About 20,000 tokens of Shakespeare, a vocabulary of 300, every speech a document."""
    folder = tmp_path_factory.mktemp("shards")
    text = shakespeare[:40_000]
    (folder / "text.txt").write_text(text)
    tokenizer = train_tokenizer([text], 300)
    prepare([str(folder / "text.txt")], folder / "shards", tokenizer, name="tiny", separator="\n\n", val_tokens=1500)
    return folder / "shards"


@pytest.fixture
def make_run(shards: Path, tmp_path: Path) -> MakeRun:
    """A `RunConfig` with a tiny model; keywords replace whole sections' values, `section__name=value`."""

    def make(**changes: object) -> RunConfig:
        table: dict[str, dict[str, object]] = {
            "model": {"context_length": 32, "vocab_size": 300, "num_layers": 2, "embd_size": 32, "num_heads": 2},
            "data": {"path": str(shards), "shuffle_seed": 1},
            "train": {"steps": 6, "tokens_per_step": 256, "micro_batch": 4, "device": "cpu"},
            "optim": {"lr": 1e-3},
            "schedule": {"name": "cosine", "warmup_steps": 2},
        }
        output_dir = changes.pop("output_dir", tmp_path / "run")
        for key, value in changes.items():
            section, name = key.split("__")
            table.setdefault(section, {})[name] = value
        return run_config({"output_dir": str(output_dir), **table})

    return make
