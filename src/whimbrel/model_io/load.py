"""Loading models: `load` reads weights, tokenizer and generation defaults, `load_model` and `load_tokenizer` one each.

Every function accepts a run (its newest intact checkpoint), a checkpoint, a Hugging Face model directory, a PEFT
adapter (with its base model), or a llama2.c `.bin` file.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from whimbrel import tokenization
from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.config import to_table
from whimbrel.model_io.adapter import ADAPTER_CONFIG, adapter_vocab_size, check_base, load_adapter
from whimbrel.model_io.llama2c import load_llama2c, load_llama2c_tokenizer, read_llama2c_config
from whimbrel.model_io.locate import ModelLocation, locate_model, model_path
from whimbrel.model_io.weights import (
    CONFIG,
    GENERATION_CONFIG,
    QUANTIZATION,
    TensorFiles,
    dense_linears,
    format_of,
    load_tensors,
    match_tensors,
    read_json,
    stored_dtype,
    stored_format,
    weight_recipe,
)
from whimbrel.models import GPT, GPTConfig, resize_vocabulary
from whimbrel.models.families import canonical, config_from_hf, tensor_mappings
from whimbrel.models.lora import cache_gains, find_lora_config, merge_lora
from whimbrel.precision import RECIPES, WeightFormat, finalize, load_into, materialize_
from whimbrel.tokenization import ChatTemplate, Tokenizer

__all__ = [
    "GenerationConfig",
    "LoadedModel",
    "ModelConfig",
    "ModelSource",
    "check_tokenizer",
    "load",
    "load_base_model",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "open_model",
    "read_architecture",
    "read_config",
    "read_generation_config",
]

EMBEDDING = "transformer.wte.weight"

GENERATION_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("0 or a positive number", lambda value: value >= 0),
    "top_k": ("an integer >= 0 (0 disables it)", lambda value: 0 <= value < 2**31),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("a positive number", lambda value: value > 0),
    "max_new_tokens": ("an integer >= 1", lambda value: 1 <= value < 2**31),
}
"""Supported fields of `generation_config.json`: a description of valid values, and the check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Generation defaults of a model."""

    bos_token_id: int
    """The token to start from if the prompt is empty."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence; at least one."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters in `generation_config.json`, as `SamplingParams` takes them."""
    max_new_tokens: int | None = None
    """Maximum number of new tokens in `generation_config.json`, if set."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk whose files, except the weights, have been read and checked."""

    location: ModelLocation
    tokenizer: Tokenizer
    generation_config: GenerationConfig

    @property
    def path(self) -> Path:
        """The model directory, the adapter directory, or the llama2.c file."""
        return self.location.directory

    def load_model(
        self,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        quantize: str | None = None,
    ) -> GPT:
        """Load the weights; see `load_model`."""
        model = _load_model(self.location, device=device, dtype=dtype, quantize=quantize)
        check_tokenizer(self.tokenizer, model.config)
        return model

    def chat_template(self, name: str = "default") -> ChatTemplate | None:
        """The model's chat template of that name, if it has any."""
        return self.location.chat_template(name)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer, generation defaults and chat template."""

    model: GPT
    tokenizer: Tokenizer
    generation_config: GenerationConfig
    chat_template: ChatTemplate | None
    location: ModelLocation


def load(
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
) -> LoadedModel:
    """Load a model with its tokenizer, generation defaults and chat template.

    `tokenizer` replaces the model's own; the other options are those of `load_model`.
    """
    source = open_model(path, tokenizer, base=base)
    template = source.chat_template()
    model = source.load_model(device=device, dtype=dtype, quantize=quantize)
    return LoadedModel(model, source.tokenizer, source.generation_config, template, source.location)


def open_model(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    *,
    base: str | os.PathLike[str] | ModelLocation | None = None,
) -> ModelSource:
    """Read everything except the weights, so that errors are raised before weights are loaded.

    `base` is the base model of an adapter, if it has moved since training.
    """
    location = locate_model(path, base)
    if tokenizer is None and (tokenizer := location.tokenizer_directory) is None:
        raise ConfigError(f"{location.directory} has no tokenizer: pass the one it was trained with (--tokenizer)")
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    config = read_architecture(location)
    check_tokenizer(tokenizer, config)
    return ModelSource(location, tokenizer, read_generation_config(location, tokenizer, config.vocab_size))


def load_model(
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    quantize_embeddings: bool = False,
    merge: bool | None = None,
) -> GPT:
    """Load a model without its tokenizer.

    The model is in evaluation mode. By default, weights are on the CPU in their stored dtype. `quantize` (int8,
    int8-dynamic, int4 or fp8) quantizes the linear layers of an unquantized model while reading it, one tensor at a
    time on the device, so that the unquantized model is never in memory; `quantize_embeddings` includes the token
    embedding and the head. A quantized directory is loaded in its own format.

    An adapter is loaded with its base model, whose linear layers are quantized as in training unless `quantize`
    overrides it. `merge` merges the adapter into the weights, dequantizing them if necessary; by default, it is merged
    only if the weights are unquantized. `base` is its base model, if it has moved since training.
    """
    location = locate_model(path, base)
    model = _load_model(
        location,
        device=device,
        dtype=dtype,
        quantize=quantize,
        quantize_embeddings=quantize_embeddings,
        merge=merge,
    )
    if find_lora_config(model) is None:  # with adapters, it stays the path of the base model
        model.name_or_path = str(path)
    return model


def _load_model(
    location: ModelLocation,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    quantize_embeddings: bool = False,
    merge: bool | None = None,
) -> GPT:
    base = location.base
    if base is None:
        return _load_directory(location.directory, device, dtype, quantize, quantize_embeddings)
    if quantize is None and (base.is_adapter or _stored_format(base.directory) is None):
        quantize = location.base_weights
    model = load_base_model(
        base, device=device, dtype=dtype, quantize=quantize, quantize_embeddings=quantize_embeddings
    )
    check_base(model, location.directory, base.directory)
    resize_vocabulary(model, read_architecture(location).vocab_size)
    if merge or (merge is None and format_of(model) is None):
        load_adapter(model, location.directory)
        merge_lora(model)
    else:
        load_adapter(model, location.directory, dtype=model.token_embedding.weight.dtype)
        cache_gains(model)
    return model


def load_base_model(
    location: ModelLocation,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    quantize_embeddings: bool = False,
) -> GPT:
    """Load a model to add adapters to. If it is an adapter itself, it is merged before weights are quantized."""
    if not location.is_adapter:
        return _load_directory(location.directory, device, dtype, quantize, quantize_embeddings)
    if quantize is None:
        return _load_model(location, device=device, dtype=dtype, merge=True)
    recipe = weight_recipe("quantize", quantize, embeddings=quantize_embeddings)
    merged = _load_model(location, dtype=dtype, merge=True)
    weights = dict(merged.named_parameters())
    with torch.device("meta"):
        model = GPT(merged.config).to(merged.token_embedding.weight.dtype)

    @torch.no_grad()
    def read(_: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name].to(parameter.device))

    load_into(model, read, recipe, device=device or "cpu")
    return model.eval()


def _stored_format(source: Path) -> WeightFormat | None:
    return None if source.is_file() else read_config(source).weight_format


def read_architecture(location: ModelLocation) -> GPTConfig:
    """The architecture of a model; for an adapter, the vocabulary includes tokens that were added in training."""
    config = read_llama2c_config(location.root) if location.root.is_file() else read_config(location.root).config
    for each in location.chain:
        if each.is_adapter:
            needed = adapter_vocab_size(each.directory)
            if (each.directory / "tokenizer.json").is_file():
                needed = max(needed, load_tokenizer(each.directory).vocab_size)
            config = replace(config, vocab_size=max(config.vocab_size, needed))
    return config


def _load_directory(
    source: Path,
    device: str | torch.device | None,
    dtype: torch.dtype | None,
    quantize: str | None,
    quantize_embeddings: bool,
) -> GPT:
    recipe = None if quantize is None else weight_recipe("quantize", quantize, embeddings=quantize_embeddings)
    if quantize_embeddings and recipe is None:
        raise ConfigError("quantize_embeddings=True needs quantize, such as quantize='int8'")
    if source.is_file():
        model = load_llama2c(source).to(device=device, dtype=dtype)
        model.name_or_path = str(source)
        if recipe is not None:
            finalize(model, recipe)
        return model.eval()
    model_type, config, stored = read_config(source)
    if recipe is not None and stored not in (None, recipe.load):
        raise CheckpointError(f"{source} is already quantized as {stored.name}, not {recipe.name}: omit quantize")
    files = TensorFiles(source)
    _check_size(source, config, files)
    matches = match_tensors(files, tensor_mappings(model_type, config), stored)
    with torch.device("meta"):
        model = GPT(config)
    model.name_or_path = str(source)
    model.to(dtype or stored_dtype(files, matches))
    if stored is not None:
        has_quantized_embedding = any(match.quantized and match.mapping.name == EMBEDDING for match in matches)
        if quantize_embeddings and not has_quantized_embedding:
            raise CheckpointError(f"the embedding in {source} is not quantized: omit quantize_embeddings")
        recipe = replace(
            RECIPES[stored.name], skip=dense_linears(model, files, matches), embeddings=has_quantized_embedding
        )

    def read(_: nn.Module) -> None:
        model.zero_padding()
        load_tensors(model, files, matches, stored)

    if recipe is None:
        materialize_(model, device or "cpu")
        read(model)
    else:
        load_into(model, read, recipe, device=device or "cpu")
    return model.eval()


def load_weights(model: GPT, path: str | os.PathLike[str]) -> None:
    """Load the weights of a model directory into a model of the same architecture, keeping its dtype and format."""
    model_type, config, weight_format = read_config(Path(path))
    expected, got = to_table(canonical(model.config)), to_table(canonical(config))
    for name in expected | got:
        if expected.get(name) != got.get(name):
            raise CheckpointError(
                f"{path}: expected a model with {name} = {expected.get(name)}, got {got.get(name)}: change the config "
                "or the path"
            )
    files = TensorFiles(Path(path))
    matches = match_tensors(files, tensor_mappings(model_type, model.config), weight_format)
    load_tensors(model, files, matches, weight_format)


def load_tokenizer(path_or_name: str | os.PathLike[str] = "gpt2") -> Tokenizer:
    """Load `gpt2`, the tokenizer of a run, checkpoint or model directory, a `tokenizer.json`, or a llama2.c `.bin`."""
    path = Path(path_or_name)
    if path.suffix == ".bin" and path.is_file():
        return load_llama2c_tokenizer(path)
    is_directory = str(path_or_name) != "gpt2" and path.is_dir()
    return tokenization.load_tokenizer(_tokenizer_directory(path) if is_directory else path_or_name)


def _tokenizer_directory(path: Path) -> Path:
    directory = model_path(path)
    if (directory / ADAPTER_CONFIG).is_file() and not (directory / "tokenizer.json").is_file():
        return locate_model(path).tokenizer_directory or directory
    return directory


def check_tokenizer(tokenizer: Tokenizer, config: GPTConfig) -> None:
    """Raise if the tokenizer has more tokens than the model's vocabulary; fewer are allowed (padding)."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"expected a tokenizer of at most {config.vocab_size} tokens for this model, got {tokenizer.vocab_size}: "
            "use the tokenizer that it was trained with"
        )


# config.json and generation_config.json


class ModelConfig(NamedTuple):
    """Parsed `config.json`: model type, architecture, weight format."""

    model_type: str
    config: GPTConfig
    weight_format: WeightFormat | None
    """The format of quantized linear layers."""


def read_config(directory: Path) -> ModelConfig:
    """Read `config.json`; raises `CheckpointError` for unsupported architectures."""
    hf_config = read_json(directory / CONFIG)
    try:
        weight_format = stored_format(hf_config)
        if weight_format is not None:
            del hf_config[QUANTIZATION]  # any other quantization_config is rejected by config_from_hf
        return ModelConfig(str(hf_config.get("model_type")), config_from_hf(hf_config), weight_format)
    except ConfigError as error:
        raise CheckpointError(f"{directory / CONFIG}: {error}") from error


def _check_size(source: Path, config: GPTConfig, files: TensorFiles) -> None:
    """Reject a config with far more weights than the files contain, before building the model."""
    size = files.num_bytes()
    if config.matrix_parameters > 2 * size:  # a weight takes at least 4 bits
        raise CheckpointError(
            f"{source / CONFIG} describes {config.matrix_parameters:,} parameters, but the weight files have only "
            f"{size:,} bytes: download the model again"
        )


def read_generation_config(location: ModelLocation, tokenizer: Tokenizer, vocab_size: int) -> GenerationConfig:
    """The generation defaults of a model; for a llama2.c file, the tokenizer's.

    Special tokens come from `generation_config.json`, else `config.json`, else the tokenizer. Ids outside the
    vocabulary are ignored: small models often keep the ids of the family that they were derived from. The end-of-text
    token of an adapter's own tokenizer, which it was trained to end with, is added to the base model's.
    Sampling parameters are included only with `do_sample`; `do_sample: false` is temperature 0.
    """
    if location.root.is_file():
        return GenerationConfig(bos_token_id=tokenizer.bos_id, eos_token_ids=(tokenizer.eot_id,))
    source = location.root
    config = read_json(source / CONFIG)
    _check_special_tokens(source / CONFIG, config)
    directory = location.find(GENERATION_CONFIG) or source
    generation = _read_generation_fields(directory)
    special = config | generation
    bos, eos = special.get("bos_token_id"), special.get("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    known = tuple(token for token in eos_ids if 0 <= token < vocab_size)
    if known != eos_ids:
        unknown = sorted(set(eos_ids) - set(known))
        logging.getLogger(__name__).warning(
            "%s: ignoring eos_token_id %s, expected ids from 0 to %d", source, unknown, vocab_size - 1
        )
    if location.is_adapter and location.tokenizer_directory == location.directory and tokenizer.eot_id not in known:
        known = (*known, tokenizer.eot_id)
    sampling = _sampling_defaults(directory / GENERATION_CONFIG, generation)
    return GenerationConfig(
        bos_token_id=bos if bos is not None and 0 <= bos < tokenizer.vocab_size else tokenizer.bos_id,
        eos_token_ids=known or (tokenizer.eot_id,),
        sampling={name: value for name, value in sampling.items() if name != "max_new_tokens"},
        max_new_tokens=sampling.get("max_new_tokens"),
    )


def _sampling_defaults(file: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    names = ["repetition_penalty", "max_new_tokens"]
    if fields.get("do_sample"):
        names += ["temperature", "top_k", "top_p", "min_p"]
    defaults = {name: fields[name] for name in names if fields.get(name) is not None}
    for name, value in defaults.items():
        expected, is_valid = GENERATION_FIELDS[name]
        if not is_valid(value):
            raise _invalid_field(file, name, expected, value)
    return defaults | ({"temperature": 0.0} if fields.get("do_sample") is False else {})


def _read_generation_fields(directory: Path) -> dict[str, Any]:
    """The content of `generation_config.json` with checked types; empty if there is no such file."""
    file = directory / GENERATION_CONFIG
    if not file.is_file():
        return {}
    fields = read_json(file)
    do_sample = fields.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise _invalid_field(file, "do_sample", "true or false", do_sample)
    for name in GENERATION_FIELDS:
        value, integer = fields.get(name), name in ("top_k", "max_new_tokens")
        if value is None or _is_integer(value):
            continue
        if integer or not isinstance(value, float) or not math.isfinite(value):
            raise _invalid_field(file, name, "an integer" if integer else "a number", value)
    _check_special_tokens(file, fields)
    return fields


def _check_special_tokens(file: Path, fields: Mapping[str, Any]) -> None:
    bos, eos = fields.get("bos_token_id"), fields.get("eos_token_id")
    if bos is not None and not _is_integer(bos):
        raise _invalid_field(file, "bos_token_id", "a token id", bos)
    if eos is not None and not all(_is_integer(token) for token in (eos if isinstance(eos, list) else [eos])):
        raise _invalid_field(file, "eos_token_id", "a token id or a list of token ids", eos)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid_field(file: Path, name: str, expected: str, value: object) -> CheckpointError:
    shown = repr(value)
    return CheckpointError(
        f"{file}: expected {name} to be {expected}, got {shown if len(shown) <= 60 else shown[:60] + '...'}"
    )
