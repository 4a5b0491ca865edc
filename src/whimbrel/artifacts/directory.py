"""Model directories as Hugging Face lays them out: `config.json`, safetensors, tokenizer, generation settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.artifacts.llama2c import load_llama2c
from whimbrel.artifacts.sources import model_directory
from whimbrel.artifacts.tables import read_table, write_table
from whimbrel.artifacts.tensors import TensorFiles, write_tensor_files
from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.base.files import atomic_directory
from whimbrel.config import to_table
from whimbrel.models import GPT, GPTConfig
from whimbrel.models.families import canonical, config_from_hf, config_to_hf
from whimbrel.models.names import Place, places
from whimbrel.text import Tokenizer

__all__ = ["SpecialTokens", "load_model", "load_weights", "save_model", "special_tokens"]

CONFIG, GENERATION = "config.json", "generation_config.json"
PREFIXES = ("transformer.", "model.")
"""What older files leave off the names of everything but the head."""
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""How the names of tensors end that older files hold but that are no weights."""


class SpecialTokens(NamedTuple):
    """The tokens that open and end a text, as a model directory names them."""

    bos_id: int | None
    eos_ids: tuple[int, ...]


def load_model(
    path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: str | torch.device | None = None
) -> GPT:
    """The model of a run (its newest checkpoint), in a Hugging Face directory, or in a llama2.c `.bin` file.

    Weights keep the dtype they are stored in, and stay on the CPU, unless told otherwise.
    """
    source = model_directory(path)
    if source.is_file():
        return load_llama2c(source).to(device=device, dtype=dtype)
    model_type, config = _read_config(source)
    files = TensorFiles(source)
    names = _match(files, places(model_type, config))
    with torch.device("meta"):
        model = GPT(config)
    model.to(dtype or _stored_dtype(files, names)).to_empty(device=device or "cpu")
    model.tie_head()
    model.zero_padding()
    _fill(model, files, names)
    return model


def load_weights(model: GPT, path: str | os.PathLike[str]) -> None:
    """Give a model of the same shape the weights in a directory, in place: dtype and device stay its own."""
    model_type, config = _read_config(Path(path))
    ours, theirs = to_table(canonical(model.config)), to_table(canonical(config))
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"{path} holds a model of {name} = {theirs.get(name)}; this one has {ours.get(name)}: make them equal, "
                "or name another directory"
            )
    files = TensorFiles(Path(path))
    _fill(model, files, _match(files, places(model_type, model.config)))


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
    there after `import whimbrel.hf`. A `state`, parameters by name, is written in place of the model's own.
    """
    config = model.config
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model's vocab_size is {config.vocab_size}"
        )
    end_of_text = None if tokenizer is None else tokenizer.eot_id
    special = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    parameters = dict(model.named_parameters()) if state is None else state
    weights = parameters["transformer.wte.weight"].dtype
    table = config_to_hf(config) | special | {"dtype": str(weights).removeprefix("torch.")}
    tensors = {place.theirs: _part(parameters, place) for place in places(table["model_type"], config)}
    with atomic_directory(path) as folder:
        write_table(folder / CONFIG, table)
        write_table(folder / GENERATION, special)
        write_tensor_files(folder, tensors, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save(folder)


def special_tokens(path: str | os.PathLike[str]) -> SpecialTokens:
    """What a model directory says opens and ends a text: `generation_config.json` first, then `config.json`."""
    table = read_table(Path(path) / CONFIG)
    if (Path(path) / GENERATION).is_file():
        table |= read_table(Path(path) / GENERATION)
    eos = table.get("eos_token_id")
    return SpecialTokens(
        table.get("bos_token_id"), tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    )


def _read_config(directory: Path) -> tuple[str, GPTConfig]:
    table = read_table(directory / CONFIG)
    try:
        return str(table.get("model_type")), config_from_hf(table)
    except ConfigError as error:
        raise CheckpointError(f"{directory / CONFIG}: {error}") from error


def _match(files: TensorFiles, wanted: list[Place]) -> dict[str, Place]:
    """Which stored tensor goes where; a directory that lacks one or holds others is refused."""
    found: dict[str, Place] = {}
    for place in wanted:
        spellings = [place.theirs, *(place.theirs.removeprefix(prefix) for prefix in PREFIXES)]
        name = next((name for name in spellings if name in files.names), None)
        if name is None:
            raise CheckpointError(f"{files.directory} lacks the tensor '{place.theirs}' that its {CONFIG} calls for")
        found[name] = place
    extra = sorted(name for name in files.names - set(found) if not name.endswith((*CONSTANTS, "lm_head.weight")))
    if extra:
        raise CheckpointError(
            f"{files.directory} holds {len(extra)} tensors that its {CONFIG} has no place for, first '{extra[0]}'"
        )
    return found


def _stored_dtype(files: TensorFiles, names: dict[str, Place]) -> torch.dtype:
    name = next(iter(names))
    dtype = files.read(name).dtype
    if not dtype.is_floating_point:
        raise CheckpointError(
            f"{files.directory} stores '{name}' as {dtype}: only floating-point weights can be loaded"
        )
    return dtype


@torch.no_grad()
def _fill(model: GPT, files: TensorFiles, names: dict[str, Place]) -> None:
    parameters = dict(model.named_parameters())
    for name, place in names.items():
        part, stored = _part(parameters, place), files.read(name)
        if part.shape != stored.shape:
            raise CheckpointError(
                f"{files.directory} holds '{name}' of shape {list(stored.shape)}; its {CONFIG} says {list(part.shape)}"
            )
        part.copy_(stored)


def _part(parameters: Mapping[str, Tensor], place: Place) -> Tensor:
    """A view of what `place` covers, in their orientation."""
    rows = parameters[place.ours][place.rows]
    return rows.T if place.transposed else rows
