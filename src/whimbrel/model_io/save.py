"""Saving models: `save_model` from memory, `copy_model` and `export_hf` from another model directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from whimbrel.base.errors import ConfigError
from whimbrel.base.files import atomic_directory
from whimbrel.model_io.adapter import load_adapter
from whimbrel.model_io.load import EMBEDDING, check_tokenizer, load_model, resolve_model
from whimbrel.model_io.weights import (
    CONFIG,
    GENERATION_CONFIG,
    QUANTIZATION,
    SCALES,
    TRANSFORMERS_WEIGHTS,
    format_of,
    quantization_entries,
    read_json,
    stored_tensors,
    weight_state_dict,
    write_json,
    write_tensor_files,
)
from whimbrel.models import GPT
from whimbrel.models.families import config_to_hf, tensor_mappings
from whimbrel.models.lora import find_lora_config, merge_lora
from whimbrel.precision import dequantize_
from whimbrel.tokenization import Tokenizer
from whimbrel.tokenization.chat_template import TEMPLATE_DIRECTORY, TEMPLATE_FILE

__all__ = ["copy_model", "export_hf", "exportable_directory", "merge_adapter", "save_model"]

MAX_SHARD_SIZE = 5 * 10**9
COPIED_FILES = (
    GENERATION_CONFIG,
    "added_tokens.json",
    TEMPLATE_FILE,
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files other than weights and config that a copied model directory must contain to generate the same text."""


def save_model(
    model: GPT,
    path: str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_size: int = MAX_SHARD_SIZE,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a model directory atomically, in weight files of at most `max_shard_size` bytes.

    A model whose family exists in transformers is saved as that (`gpt2`, `llama`, ...), any other as `whimbrel`, which
    transformers loads after `import whimbrel.hf`. Quantized weights are saved as codes and scales. `state`, a
    `weight_state_dict`, is saved instead of the current weights.
    """
    _check_merged(model)
    config = model.config
    if tokenizer is not None:
        check_tokenizer(tokenizer, config)
    end_of_text = None if tokenizer is None else tokenizer.eot_id
    token_ids = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    parameters = weight_state_dict(model) if state is None else state
    dtype = parameters[EMBEDDING if EMBEDDING in parameters else EMBEDDING + SCALES].dtype
    hf_config = config_to_hf(config) | token_ids | {"dtype": str(dtype).removeprefix("torch.")}
    hf_config |= quantization_entries(format_of(model))
    tensors = stored_tensors(tensor_mappings(hf_config["model_type"], config), parameters)
    with atomic_directory(path) as directory:
        write_json(directory / CONFIG, hf_config)
        write_json(directory / GENERATION_CONFIG, token_ids)
        write_tensor_files(directory, tensors, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save(directory)


def copy_model(source: Path, model: GPT, directory: Path) -> None:
    """Write the current weights of `model` into `directory`, and copy all other files from `source`."""
    _check_merged(model)
    dtype = model.token_embedding.weight.dtype
    hf_config = read_json(source / CONFIG) | {"dtype": str(dtype).removeprefix("torch.")}
    for key in (QUANTIZATION, TRANSFORMERS_WEIGHTS, "torch_dtype"):
        hf_config.pop(key, None)
    hf_config |= quantization_entries(format_of(model))
    write_json(directory / CONFIG, hf_config)
    for name in COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    if (source / TEMPLATE_DIRECTORY).is_dir():
        shutil.copytree(source / TEMPLATE_DIRECTORY, directory / TEMPLATE_DIRECTORY)
    tensors = stored_tensors(tensor_mappings(hf_config["model_type"], model.config), weight_state_dict(model))
    write_tensor_files(directory, tensors, max_shard_size=MAX_SHARD_SIZE)


def _check_merged(model: GPT) -> None:
    if find_lora_config(model) is not None:
        raise ConfigError(
            "expected a model without adapters, whose weights a model directory would lack: call merge_lora first, or "
            "save the adapters with save_adapter"
        )


def merge_adapter(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write an unquantized copy of a run, checkpoint or model directory with an adapter added to its weights.

    The directory appears atomically; weights are in `dtype`, or in the stored dtype.
    """
    model_directory = exportable_directory(base)
    with atomic_directory(path) as directory:
        model = load_model(model_directory, dtype=dtype)
        load_adapter(model, adapter)
        merge_lora(model)
        dequantize_(model)
        copy_model(model_directory, model, directory)


def export_hf(
    source: str | os.PathLike[str], path: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Write an unquantized copy of a run, checkpoint or model directory atomically, in `dtype` or the stored dtype."""
    model_directory = exportable_directory(source)
    with atomic_directory(path) as directory:
        model = load_model(model_directory, dtype=dtype)
        dequantize_(model)
        copy_model(model_directory, model, directory)


def exportable_directory(source: str | os.PathLike[str]) -> Path:
    """The model directory of a run, checkpoint or model directory; llama2.c files are rejected."""
    directory = resolve_model(source)
    if directory.is_file():
        raise ConfigError(
            f"expected a run, a checkpoint or a model directory, got the file {directory}: convert a llama2.c file "
            "with save_model(load_model(file), directory, load_tokenizer(tokenizer))"
        )
    return directory
