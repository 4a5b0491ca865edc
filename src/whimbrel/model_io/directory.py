"""Model directories as Hugging Face lays them out: `config.json`, safetensors, tokenizer, generation settings."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.base.files import atomic_directory
from whimbrel.config import to_table
from whimbrel.model_io.llama2c import load_llama2c, read_llama2c_config
from whimbrel.model_io.quantized import (
    QUANTIZATION,
    SCALES,
    format_of,
    quantization_entries,
    stored_format,
    weight_recipe,
    weight_state,
)
from whimbrel.model_io.sources import load_tokenizer, model_directory
from whimbrel.model_io.tables import read_table, write_table
from whimbrel.model_io.tensors import TensorFiles, write_tensor_files
from whimbrel.model_io.weights import fill, match, stored_dtype, stored_plain, tensors_at
from whimbrel.models import GPT, GPTConfig
from whimbrel.models.families import canonical, config_from_hf, config_to_hf, tensor_mappings
from whimbrel.precision import RECIPES, WeightFormat, finalize, load_into, materialise_
from whimbrel.tokenization import Tokenizer

__all__ = [
    "Description",
    "SpecialTokens",
    "check_tokenizer",
    "describe",
    "generation_settings",
    "load_model",
    "load_weights",
    "model_tokenizer",
    "save_model",
    "special_tokens",
]

CONFIG, GENERATION = "config.json", "generation_config.json"
EMBEDDING = "transformer.wte.weight"

SETTINGS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("0 or a positive number", lambda value: value >= 0),
    "top_k": ("a non-negative integer, 0 to turn it off", lambda value: 0 <= value < 2**31),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("a positive number", lambda value: value > 0),
    "max_new_tokens": ("an integer of at least 1", lambda value: 1 <= value < 2**31),
}
"""Fields of `generation_config.json` in use: the expected value in words, and its check."""


class SpecialTokens(NamedTuple):
    """The tokens that open and end a text, as a model directory names them."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def opener(self, tokenizer: Tokenizer) -> int:
        """The token that replaces an empty prompt: the model's BOS token, or else the tokenizer's.

        Small models often keep their family's default id, which may be outside their vocabulary.
        """
        known = self.bos_id is not None and 0 <= self.bos_id < tokenizer.vocab_size
        return self.bos_id if known and self.bos_id is not None else tokenizer.bos_id


class Description(NamedTuple):
    """What a `config.json` says: whose layout the files have, the shape, and the format of quantised linears."""

    model_type: str
    config: GPTConfig
    form: WeightFormat | None


def describe(directory: Path) -> Description:
    """What the `config.json` of a model directory says."""
    table = read_table(directory / CONFIG)
    try:
        form = stored_format(table)
        if form is not None:
            del table[QUANTIZATION]  # what is left of it is somebody else's, which is refused
        return Description(str(table.get("model_type")), config_from_hf(table), form)
    except ConfigError as error:
        raise CheckpointError(f"{directory / CONFIG}: {error}") from error


def model_tokenizer(source: Path, other: str | os.PathLike[str] | None = None) -> Tokenizer:
    """The tokenizer in a model directory, or another for the model; its weights are not read."""
    if source.is_file():
        _refuse_gguf(source)
        if other is None:
            raise ConfigError(
                f"the file {source} holds no tokenizer: pass --tokenizer with the one it was trained with"
            )
    if other is None:
        return load_tokenizer(source)
    tokenizer = load_tokenizer(other)
    check_tokenizer(tokenizer, read_llama2c_config(source) if source.is_file() else describe(source).config)
    return tokenizer


def check_size(source: Path, config: GPTConfig, files: TensorFiles) -> None:
    """Refuse a `config.json` that describes far more weights than the files can hold, before building the model."""
    held = files.num_bytes()
    if config.matrix_parameters > 2 * held:  # a weight takes 4 bits at least
        raise CheckpointError(
            f"{source / CONFIG} describes {config.matrix_parameters:,} parameters, but the weight files have only "
            f"{held:,} bytes: download the model again"
        )


def _refuse_gguf(file: Path) -> None:
    with file.open("rb") as opened:
        if opened.read(4) == b"GGUF":
            raise CheckpointError(
                f"{file} is a GGUF file, which whimbrel exports but does not load: pass the model directory instead"
            )


def check_tokenizer(tokenizer: Tokenizer, config: GPTConfig) -> None:
    """Refuse a tokenizer with ids that a model does not have; a model may have more than its tokenizer."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {config.vocab_size}: give the model's"
        )


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    weights: str | None = None,
    quantize_embeddings: bool = False,
) -> GPT:
    """The model of a run (its newest checkpoint), in a Hugging Face directory, or in a llama2.c `.bin` file.

    Weights keep the dtype they are stored in, and stay on the CPU, unless told otherwise. With `weights` (int8,
    int8-dynamic, int4 or fp8) the linears of a plain model are quantised as they are read, one at a time and on the
    device, so that the plain model is never in memory; with `quantize_embeddings` the token embedding and the head too.
    A quantised directory is loaded as what it is.
    """
    source = model_directory(path)
    recipe = None if weights is None else weight_recipe("weights", weights, embeddings=quantize_embeddings)
    if quantize_embeddings and recipe is None:
        raise ConfigError("quantize_embeddings = True needs a format: set weights, such as weights='int8'")
    if source.is_file():
        _refuse_gguf(source)
        model = load_llama2c(source).to(device=device, dtype=dtype)
        if recipe is not None:
            finalize(model, recipe)
        return model
    model_type, config, stored = describe(source)
    if recipe is not None and stored not in (None, recipe.load):
        raise CheckpointError(f"{source} holds {stored.name} weights, not {recipe.name}: leave weights= out")
    files = TensorFiles(source)
    check_size(source, config, files)
    found = match(files, tensor_mappings(model_type, config), stored)
    with torch.device("meta"):
        model = GPT(config)
    model.to(dtype or stored_dtype(files, found))
    if stored is not None:
        coded = any(quantized and place.name == EMBEDDING for place, _, quantized in found)
        if quantize_embeddings and not coded:
            raise CheckpointError(f"the embedding in {source} is not quantized: leave quantize_embeddings out")
        recipe = replace(RECIPES[stored.name], skip=stored_plain(model, files, found), embeddings=coded)

    def read(_: nn.Module) -> None:
        model.zero_padding()
        fill(model, files, found, stored)

    if recipe is None:
        materialise_(model, device or "cpu")
        read(model)
    else:
        load_into(model, read, recipe, device=device or "cpu")
    return model


def load_weights(model: GPT, path: str | os.PathLike[str]) -> None:
    """Give a model of the same shape the weights in a directory, in place: dtype, device and format stay its own."""
    model_type, config, form = describe(Path(path))
    ours, theirs = to_table(canonical(model.config)), to_table(canonical(config))
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"{path} holds a model of {name} = {theirs.get(name)}; this one has {ours.get(name)}: make them equal, "
                "or name another directory"
            )
    files = TensorFiles(Path(path))
    fill(model, files, match(files, tensor_mappings(model_type, model.config), form), form)


def save_model(
    model: GPT,
    path: str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_size: int = 5 * 10**9,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a directory that `transformers` opens too, whole or not at all, in files of at most `max_shard_size` bytes.

    A shape that `transformers` has is written as its own (`gpt2`, `llama`, ...); any other as `whimbrel`, which opens
    there after `import whimbrel.hf`. Quantised weights are written as codes and scales. A `state`, as `weight_state`
    gives it, is written in place of the model's own.
    """
    config = model.config
    if tokenizer is not None:
        check_tokenizer(tokenizer, config)
    end_of_text = None if tokenizer is None else tokenizer.eot_id
    special = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    parameters = weight_state(model) if state is None else state
    form = format_of(model)
    weights = parameters[EMBEDDING if EMBEDDING in parameters else EMBEDDING + SCALES].dtype
    table = config_to_hf(config) | special | {"dtype": str(weights).removeprefix("torch.")}
    table |= quantization_entries(form)
    tensors = tensors_at(tensor_mappings(table["model_type"], config), parameters)
    with atomic_directory(path) as folder:
        write_table(folder / CONFIG, table)
        write_table(folder / GENERATION, special)
        write_tensor_files(folder, tensors, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save(folder)


def generation_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """How a model directory says tokens are drawn: temperature (0: the likeliest), top_k, top_p, min_p.

    Only what it says is there, and also where it does not draw: repetition_penalty and max_new_tokens. Where it does
    not say whether to draw at all (`do_sample`), no more than these are. A field of the wrong type is refused, and
    so is one outside its range that would be used.
    """
    table = _generation_table(Path(path))
    names = ["repetition_penalty", "max_new_tokens"]
    if table.get("do_sample"):
        names += ["temperature", "top_k", "top_p", "min_p"]
    held = {name: table[name] for name in names if table.get(name) is not None}
    for name, value in held.items():
        kind, is_valid = SETTINGS[name]
        if not is_valid(value):
            raise _wrong_field(Path(path) / GENERATION, name, kind, value)
    return held | ({"temperature": 0.0} if table.get("do_sample") is False else {})


def special_tokens(path: str | os.PathLike[str]) -> SpecialTokens:
    """What a model directory says opens and ends a text: `generation_config.json` first, then `config.json`."""
    table = read_table(Path(path) / CONFIG)
    _check_special_tokens(Path(path) / CONFIG, table)
    table |= _generation_table(Path(path))
    eos = table.get("eos_token_id")
    return SpecialTokens(
        table.get("bos_token_id"), tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    )


def _generation_table(directory: Path) -> dict[str, Any]:
    """The contents of `generation_config.json` with checked field types; empty if there is no such file."""
    file = directory / GENERATION
    if not file.is_file():
        return {}
    table = read_table(file)
    do_sample = table.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise _wrong_field(file, "do_sample", "true or false", do_sample)
    for name in SETTINGS:
        value, whole = table.get(name), name in ("top_k", "max_new_tokens")
        if value is None or _is_whole(value):
            continue
        if whole or not isinstance(value, float) or not math.isfinite(value):
            raise _wrong_field(file, name, "an integer" if whole else "a number", value)
    _check_special_tokens(file, table)
    return table


def _check_special_tokens(file: Path, table: Mapping[str, Any]) -> None:
    bos, eos = table.get("bos_token_id"), table.get("eos_token_id")
    if bos is not None and not _is_whole(bos):
        raise _wrong_field(file, "bos_token_id", "a token id", bos)
    if eos is not None and not all(_is_whole(token) for token in (eos if isinstance(eos, list) else [eos])):
        raise _wrong_field(file, "eos_token_id", "a token id or a list of token ids", eos)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong_field(file: Path, name: str, expected: str, value: object) -> CheckpointError:
    shown = repr(value)
    return CheckpointError(
        f"{file}: expected {name} to be {expected}, got {shown if len(shown) <= 60 else shown[:60] + '...'}"
    )
