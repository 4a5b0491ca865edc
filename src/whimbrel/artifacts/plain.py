"""A plain copy of a model directory, in another dtype or without its quantisation: what every other tool can open."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from whimbrel.artifacts.directory import CONFIG, GENERATION, load_model
from whimbrel.artifacts.quantized import QUANTIZATION, weight_state
from whimbrel.artifacts.sources import model_directory
from whimbrel.artifacts.tables import read_table, write_table
from whimbrel.artifacts.tensors import write_tensor_files
from whimbrel.artifacts.weights import tensors_at
from whimbrel.base.errors import ConfigError
from whimbrel.base.files import atomic_directory
from whimbrel.models.names import places
from whimbrel.precision.swap import dequantize_

__all__ = ["exported_directory", "export_hf"]

CARRIED = (
    GENERATION,
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""What a model directory may hold beside weights and shape that makes the text of the copy that of the original."""


def export_hf(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
) -> None:
    """Write the model of a run, a checkpoint or a model directory as a plain model directory, whole or not at all.

    Weights have `dtype`, or the one they are stored in; quantised ones become the numbers that they stand for.
    """
    directory = exported_directory(source)
    model = load_model(directory, dtype=dtype)
    dequantize_(model)
    stored = model.token_embedding.weight.dtype
    table = read_table(directory / CONFIG) | {"dtype": str(stored).removeprefix("torch.")}
    for left_behind in (QUANTIZATION, "torch_dtype"):
        table.pop(left_behind, None)
    tensors = tensors_at(places(table["model_type"], model.config), weight_state(model))
    with atomic_directory(path) as folder:
        write_table(folder / CONFIG, table)
        for name in CARRIED:
            if (directory / name).is_file():
                shutil.copyfile(directory / name, folder / name)
        write_tensor_files(folder, tensors, max_shard_size=max_shard_size)


def exported_directory(source: str | os.PathLike[str]) -> Path:
    """The model directory that a run, a checkpoint or a model directory stands for."""
    directory = model_directory(source)
    if directory.is_file():
        raise ConfigError(
            f"{directory} is a file, and export takes a run, a checkpoint or a model directory: make one of a llama2.c "
            "file with save_model(load_model(file), directory, load_tokenizer(tokenizer))"
        )
    return directory
