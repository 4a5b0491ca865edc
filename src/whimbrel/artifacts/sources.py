"""What the path a user gives stands for: a run, a checkpoint, a model or a tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

from whimbrel import text
from whimbrel.base.errors import CheckpointError
from whimbrel.base.logging import get_logger
from whimbrel.checkpoint import list_checkpoints, verify_component
from whimbrel.text.llama2c import load_llama2c_tokenizer

__all__ = ["load_tokenizer", "model_directory"]


def model_directory(path: str | os.PathLike[str]) -> Path:
    """Where the model lies: that of a run's newest whole checkpoint, that of a checkpoint, or the path itself."""
    source = Path(path)
    if not source.exists():
        raise CheckpointError(f"no run or model at {source}: give a run, a model directory or a llama2.c .bin file")
    if (source / "checkpoints").is_dir() and not (source / "config.json").exists():
        source = _newest_whole(source)
    elif (source / "manifest.json").is_file() and (source / "model").is_dir():
        verify_component(source, "model")
    else:
        return source
    return source / "model"


def _newest_whole(run: Path) -> Path:
    """The newest checkpoint of a run whose model is as it was written; a damaged one is passed over, loudly."""
    for path in reversed(list_checkpoints(run).values()):
        try:
            verify_component(path, "model")
        except CheckpointError as error:
            get_logger(__name__).warning("passed over: %s", error)
        else:
            return path
    raise CheckpointError(f"the run {run} has no whole checkpoint yet: train it further")


def load_tokenizer(path_or_name: str | os.PathLike[str] = "gpt2") -> text.Tokenizer:
    """The tokenizer `gpt2`, that of a run, a checkpoint or a model, a `tokenizer.json`, or a llama2.c `.bin` file."""
    path = Path(path_or_name)
    if path.suffix == ".bin" and path.is_file():
        return load_llama2c_tokenizer(path)
    named = str(path_or_name) == "gpt2" or not path.is_dir()
    return text.load_tokenizer(path_or_name if named else model_directory(path))
