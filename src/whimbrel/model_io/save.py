"""Saving models: `save_model` from memory, `copy_model` and `export_hf` from another model directory or adapter."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from whimbrel.base.errors import ConfigError
from whimbrel.base.files import atomic_directory
from whimbrel.model_io.load import EMBEDDING, check_tokenizer, load_model, load_tokenizer, read_generation_config
from whimbrel.model_io.locate import ModelLocation, locate_model
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
from whimbrel.models.lora import find_lora_config
from whimbrel.precision import dequantize_
from whimbrel.tokenization import Tokenizer, load_chat_template
from whimbrel.tokenization.chat_template import TEMPLATE_DIRECTORY, TEMPLATE_FILE

__all__ = [
    "TOKENIZER_FILES",
    "copy_model",
    "copy_text_files",
    "export_hf",
    "exportable_location",
    "merge_adapter",
    "merged_directory",
    "save_model",
]

MAX_SHARD_SIZE = 5 * 10**9
TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


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


def copy_model(location: ModelLocation, model: GPT, directory: Path) -> None:
    """Write the current weights of `model` into `directory`, and copy all other files from `location`."""
    _check_merged(model)
    dtype = model.token_embedding.weight.dtype
    hf_config = read_json(location.root / CONFIG) | {"dtype": str(dtype).removeprefix("torch.")}
    for key in (QUANTIZATION, TRANSFORMERS_WEIGHTS, "torch_dtype"):
        hf_config.pop(key, None)
    hf_config |= quantization_entries(format_of(model))
    if location.is_adapter:  # tokens may have been added
        hf_config["vocab_size"] = model.config.vocab_size
    write_json(directory / CONFIG, hf_config)
    copy_text_files(location, directory, model.config.vocab_size)
    tensors = stored_tensors(tensor_mappings(hf_config["model_type"], model.config), weight_state_dict(model))
    write_tensor_files(directory, tensors, max_shard_size=MAX_SHARD_SIZE)


def copy_text_files(location: ModelLocation, directory: Path, vocab_size: int) -> None:
    """Copy tokenizer, chat template and generation config: the adapter's own, else its base model's."""
    source = location.tokenizer_directory or location.root
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    if (generation := location.find(GENERATION_CONFIG)) is not None:
        shutil.copyfile(generation / GENERATION_CONFIG, directory / GENERATION_CONFIG)
    if (source / TEMPLATE_FILE).is_file():
        shutil.copyfile(source / TEMPLATE_FILE, directory / TEMPLATE_FILE)
    if (source / TEMPLATE_DIRECTORY).is_dir():
        shutil.copytree(source / TEMPLATE_DIRECTORY, directory / TEMPLATE_DIRECTORY)
    if location.is_adapter and location.tokenizer_directory is not None:
        template = location.chat_template()
        copied = load_chat_template(directory)
        if template is not None and (copied is None or copied.source != template.source):
            template.save(directory)
        tokenizer = load_tokenizer(source)
        vocab_size = max(vocab_size, tokenizer.vocab_size)  # the base model's may lack added tokens
        eos_ids = list(read_generation_config(location, tokenizer, vocab_size).eos_token_ids)
        file = directory / GENERATION_CONFIG
        fields = {"eos_token_id": eos_ids if len(eos_ids) > 1 else eos_ids[0]}
        write_json(file, (read_json(file) if file.is_file() else {}) | fields)


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
    export_hf(adapter, path, base=base, dtype=dtype)


def export_hf(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write an unquantized copy of a run, checkpoint or model directory, atomically, in `dtype` or the stored dtype.

    An adapter is merged with its base model.
    """
    location = exportable_location(source, base)
    with atomic_directory(path) as directory:
        model = load_model(source, base=base, dtype=dtype, merge=True)
        dequantize_(model)
        copy_model(location, model, directory)


@contextmanager
def merged_directory(
    source: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None, dtype: torch.dtype | None = None
) -> Iterator[Path]:
    """The directory of a model; for adapters a temporary one, with merged weights."""
    location = exportable_location(source, base)
    if not location.is_adapter:
        yield location.directory
        return
    with TemporaryDirectory(prefix="whimbrel-") as folder:
        export_hf(source, Path(folder) / "merged", base=base, dtype=dtype)
        yield Path(folder) / "merged"


def exportable_location(source: str | os.PathLike[str], base: str | os.PathLike[str] | None = None) -> ModelLocation:
    """The location of a run, checkpoint, model directory or adapter; llama2.c files are rejected."""
    location = locate_model(source, base)
    if location.root.is_file():
        raise ConfigError(
            f"expected a run, a checkpoint or a model directory, got the file {location.root}: convert a llama2.c file "
            "with save_model(load_model(file), directory, load_tokenizer(tokenizer))"
        )
    return location
