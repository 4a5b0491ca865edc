"""What the path a user gives stands for: a run, a checkpoint, a model or a tokenizer."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from whimbrel import tokenization
from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.checkpoint import best_first, list_checkpoints, verify_component
from whimbrel.tokenization.llama2c import load_llama2c_tokenizer

__all__ = ["choose_checkpoint", "load_tokenizer", "model_directory", "run_of"]


WANTED = "give a run, a model directory or a llama2.c .bin file"


def model_directory(path: str | os.PathLike[str]) -> Path:
    """Where the model lies: that of a run's newest whole checkpoint, that of a checkpoint, or the path itself."""
    source = _stands_for(path)
    if source.is_dir() and not (source / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json: {WANTED}")
    return source


def _stands_for(path: str | os.PathLike[str]) -> Path:
    """As `model_directory`, whatever is there: a folder may hold a tokenizer alone."""
    source = Path(path)
    if not source.exists():
        raise CheckpointError(f"no run or model at {source}: {WANTED}")
    if _is_run(source):
        source = _newest_whole(source)
    elif (source / "manifest.json").is_file() and (source / "model").is_dir():
        verify_component(source, "model")
    else:
        return source
    return source / "model"


def run_of(path: str | os.PathLike[str]) -> Path | None:
    """The run that a path is, or lies in as one of its checkpoints or the model of one; None for other models."""
    source = Path(path)
    return next((folder for folder in (source, *source.absolute().parents[1:3]) if _is_run(folder)), None)


def choose_checkpoint(run: Path, which: str, *, greater_is_better: bool = False) -> Path:
    """A checkpoint of a run: `latest`, `best` by the metric that its checkpoints were saved with, or that of a step."""
    if not _is_run(run):
        what = "is none: leave it out" if run.exists() else "is not there: name one"
        raise ConfigError(f"checkpoint = {which} is for a run, and {run} {what}")
    if which == "latest":
        return _newest_whole(run)
    if which == "best":
        ranked = best_first(run, greater_is_better=greater_is_better)
        if not ranked:
            raise CheckpointError(f"no checkpoint of {run} was saved with a metric: give 'latest' or a step")
        return ranked[0][1]
    found = list_checkpoints(run)
    if not which.isdecimal() or int(which) not in found:
        steps = ", ".join(map(str, found)) or "none yet"
        raise CheckpointError(f"checkpoint = {which} is not latest, best or a step that {run} has: it has {steps}")
    return found[int(which)]


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir() and not (path / "config.json").exists()


def _newest_whole(run: Path) -> Path:
    """The newest checkpoint of a run whose model is as it was written; a damaged one is passed over, loudly."""
    for path in reversed(list_checkpoints(run).values()):
        try:
            verify_component(path, "model")
        except CheckpointError as error:
            logging.getLogger(__name__).warning("passed over: %s", error)
        else:
            return path
    raise CheckpointError(f"the run {run} has no whole checkpoint yet: train it further")


def load_tokenizer(path_or_name: str | os.PathLike[str] = "gpt2") -> tokenization.Tokenizer:
    """The tokenizer `gpt2`, that of a run, a checkpoint or a model, a `tokenizer.json`, or a llama2.c `.bin` file."""
    path = Path(path_or_name)
    if path.suffix == ".bin" and path.is_file():
        return load_llama2c_tokenizer(path)
    named = str(path_or_name) == "gpt2" or not path.is_dir()
    return tokenization.load_tokenizer(path_or_name if named else _stands_for(path))
