"""Shards and short runs on a small text."""

from __future__ import annotations

from pathlib import Path

from whimbrel.data.prepare import prepare
from whimbrel.tokenization import Tokenizer, train_tokenizer
from whimbrel.train import train
from whimbrel.train.run_config import build_run_config


def prepare_text(folder: Path, text: str, *, vocab_size: int = 300, val_tokens: int = 1500) -> Tokenizer:
    """Write FOLDER/text.txt and prepare FOLDER/shards with a tokenizer trained on the text."""
    (folder / "text.txt").write_text(text)
    tokenizer = train_tokenizer([text], vocab_size)
    prepare([folder / "text.txt"], folder / "shards", tokenizer, name="tiny", separator="\n\n", val_tokens=val_tokens)
    return tokenizer


def train_demo_run(folder: Path, text: str, *, context_length: int) -> None:
    """Train FOLDER/runs/demo for two steps, for commands of the documentation that read a run of this name."""
    prepare_text(folder, text)
    model = {
        "context_length": context_length, "vocab_size": 300, "num_layers": 1, "embd_size": 128, "num_heads": 4,
    }  # fmt: skip
    table = {
        "output_dir": str(folder / "runs" / "demo"), "data": {"path": str(folder / "shards")}, "model": model,
        "train": {"steps": 2, "tokens_per_step": 4 * context_length, "micro_batch": 4, "device": "cpu"},
    }  # fmt: skip
    train(build_run_config(table))
