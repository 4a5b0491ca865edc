"""A model directory made from another: weights of its model, everything else as it is there."""

from __future__ import annotations

import shutil
from pathlib import Path

from whimbrel.model_io.directory import CONFIG, GENERATION
from whimbrel.model_io.quantized import QUANTIZATION, WEIGHTS_FILE, format_of, quantization_entries, weight_state
from whimbrel.model_io.tables import read_table, write_table
from whimbrel.model_io.tensors import write_tensor_files
from whimbrel.model_io.weights import tensors_at
from whimbrel.models import GPT
from whimbrel.models.families import tensor_mappings

__all__ = ["CARRIED", "write_copy"]

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
"""What a model directory may hold beside weights and shape that makes the text of a copy that of the original."""


def write_copy(source: Path, model: GPT, folder: Path, *, max_shard_size: int = 5 * 10**9) -> None:
    """Fill `folder` with a directory like `source`, the weights being those of `model` as they are now."""
    form, dtype = format_of(model), model.token_embedding.weight.dtype
    table = read_table(source / CONFIG) | {"dtype": str(dtype).removeprefix("torch.")}
    for left_behind in (QUANTIZATION, WEIGHTS_FILE, "torch_dtype"):
        table.pop(left_behind, None)
    table |= quantization_entries(form)
    write_table(folder / CONFIG, table)
    for name in CARRIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    tensors = tensors_at(tensor_mappings(table["model_type"], model.config), weight_state(model))
    write_tensor_files(folder, tensors, max_shard_size=max_shard_size)
