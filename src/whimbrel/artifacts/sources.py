"""What the path a user gives stands for: a run, a checkpoint, a model or a tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

from whimbrel import text
from whimbrel.base.errors import CheckpointError
from whimbrel.checkpoint import latest_checkpoint
from whimbrel.text.llama2c import load_llama2c_tokenizer

__all__ = ["load_tokenizer", "model_directory"]


def model_directory(path: str | os.PathLike[str]) -> Path:
    """Where the model lies: that of a run's newest whole checkpoint, that of a checkpoint, or the path itself."""
    source = Path(path)
    if not source.exists():
        raise CheckpointError(f"no run or model at {source}: give a run, a model directory or a llama2.c .bin file")
    if (source / "checkpoints").is_dir() and not (source / "config.json").exists():
        newest = latest_checkpoint(source)
        if newest is None:
            raise CheckpointError(f"the run {source} has no whole checkpoint yet: train it further")
        source = newest
    return source / "model" if (source / "manifest.json").is_file() and (source / "model").is_dir() else source


def load_tokenizer(path_or_name: str | os.PathLike[str] = "gpt2") -> text.Tokenizer:
    """The tokenizer `gpt2`, that of a run, a checkpoint or a model, a `tokenizer.json`, or a llama2.c `.bin` file."""
    path = Path(path_or_name)
    if path.suffix == ".bin" and path.is_file():
        return load_llama2c_tokenizer(path)
    named = str(path_or_name) == "gpt2" or not path.is_dir()
    return text.load_tokenizer(path_or_name if named else model_directory(path))
