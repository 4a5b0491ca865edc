"""A plain copy of a model directory, in another dtype or without its quantisation: what every other tool can open."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from whimbrel.base.errors import ConfigError
from whimbrel.base.files import atomic_directory
from whimbrel.model_io.copies import write_copy
from whimbrel.model_io.directory import load_model
from whimbrel.model_io.sources import model_directory
from whimbrel.precision import dequantize_

__all__ = ["export_hf", "exported_directory"]


def export_hf(
    source: str | os.PathLike[str], path: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Write the model of a run, a checkpoint or a model directory as a plain model directory, whole or not at all.

    Weights have `dtype`, or the one they are stored in; quantised ones become the numbers that they stand for.
    """
    directory = exported_directory(source)
    with atomic_directory(path) as folder:
        model = load_model(directory, dtype=dtype)
        dequantize_(model)
        write_copy(directory, model, folder)


def exported_directory(source: str | os.PathLike[str]) -> Path:
    """The model directory that a run, a checkpoint or a model directory stands for."""
    directory = model_directory(source)
    if directory.is_file():
        raise ConfigError(
            f"{directory} is a file, and export takes a run, a checkpoint or a model directory: make one of a llama2.c "
            "file with save_model(load_model(file), directory, load_tokenizer(tokenizer))"
        )
    return directory
