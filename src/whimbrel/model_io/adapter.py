"""LoRA adapter directories in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

PEFT loads what `save_adapter` writes, and `load_adapter` what PEFT writes; PEFT itself is not needed. Settings of an
`adapter_config.json` that would change the result and are not supported raise CheckpointError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.base.files import atomic_directory
from whimbrel.checkpoint import write_tensors
from whimbrel.distributed.state import copy_full_
from whimbrel.model_io.weights import read_json, write_json
from whimbrel.models import GPT, GPTConfig
from whimbrel.models.families import config_to_hf, tensor_mappings
from whimbrel.models.lora import (
    EMBEDDING,
    HEAD,
    LoraConfig,
    LoraTarget,
    apply_lora,
    find_lora_config,
    lora_linears,
    lora_parameters,
    lora_targets,
    token_modules,
    trainable_tokens,
)

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "BASE_INFO",
    "Adapter",
    "AdapterModule",
    "adapter_config",
    "adapter_vocab_size",
    "base_reference",
    "base_values",
    "check_base",
    "load_adapter",
    "load_adapter_weights",
    "read_adapter",
    "save_adapter",
]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_INFO = "base_model.json"
"""Written by training: a fingerprint and sampled values of the base model, and its quantization format, if any."""
SAMPLED_ROWS, SAMPLED_COLUMNS = 8, 2
"""Number of values sampled from each linear layer to identify the base model."""
MAX_DIFFERENCE, MAX_DIFFERENCE_QUANTIZED = 2**-8, 0.3
"""Maximum relative RMS difference of the sampled values of the same base model. bf16 rounds by up to 2**-8, typically
by 0.0016; 4-bit weights differ by about 0.1 from the original; unrelated weights by 1.4."""
PREFIX = "base_model.model."
"""Prefix of the names of all tensors of an adapter."""
SUFFIXES = {
    "lora_A": ".lora_A.weight",
    "lora_B": ".lora_B.weight",
    "lora_magnitude_vector": ".lora_magnitude_vector",
    "trainable_tokens": ".token_adapter.trainable_tokens_delta",
}
"""PEFT's name suffix for each adapter parameter. Despite its name, trainable_tokens_delta has complete rows."""
TOKENS_SUFFIX = SUFFIXES["trainable_tokens"]
COMPLETE_SUFFIXES = (".token_adapter.base_layer.weight", ".weight")
"""Name suffixes of complete embeddings and heads, which PEFT saves if they were resized before training."""
BARE_PREFIXES = ("model.", "transformer.")
"""Prefixes that adapters of a model without a head (`AutoModel`) omit."""

READ = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
)
SHOWN_BY_TENSORS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
"""Which modules have adapters; the names of the tensors tell that."""
WITHOUT_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
)
"""Entries that do not affect what an adapter computes, given its tensors and the checks of other entries."""
ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    # Others, such as PiSSA, also replace the base weights by a residual.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""Entries with their supported values. Any other entry must be unset: null, false or empty."""
UNUSED_WITH_INIT = ("eva_config", "corda_config", "lora_ga_config")
"""Settings of initializations, which are checked by `init_lora_weights`."""


class AdapterModule(NamedTuple):
    """The tensors of an adapter for one Hugging Face module, on the CPU."""

    target: LoraTarget
    down: Tensor
    """A: (rank, input features)."""
    up: Tensor
    """B: (output features, rank)."""
    magnitude: Tensor | None
    """(output features,), for DoRA."""
    alpha: float
    scaling: float
    """Factor of `B A`."""


class AdapterTokens(NamedTuple):
    """Trained rows of an embedding or head, on the CPU."""

    ids: tuple[int, ...]
    rows: Tensor
    """(tokens, width)."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter directory that was read and checked against a model's architecture."""

    config: LoraConfig
    modules: tuple[AdapterModule, ...]
    """In the order of the model."""
    base_model: str | None
    """`base_model_name_or_path`."""
    tokens: Mapping[str, AdapterTokens]
    """Trained rows of the embedding and the head, by GPT module name."""
    embeddings: Mapping[str, Tensor]
    """Complete weights (vocab_size, width) by GPT module name, if the base model was resized for training."""


# Reading


def read_adapter(path: str | os.PathLike[str], config: GPTConfig) -> Adapter:
    """Read an adapter for models of the architecture `config`; raises CheckpointError if it does not fit."""
    directory = Path(path)
    table = _read_config(directory)
    tensors = _read_tensors(directory)
    tokens, embeddings = _take_embeddings(directory, table, tensors, config)
    targets = {alias: target for target in lora_targets(config) for alias in _aliases(target.module)}
    grouped: dict[LoraTarget, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, parameter = _parse_name(directory, name)
        if module not in targets:
            raise CheckpointError(
                f"{directory}: expected adapters of linear layers of this model, got '{name}': use the base model that "
                "the adapter was trained on; adapters of embeddings and the head are not supported"
            )
        grouped.setdefault(targets[module], {})[parameter] = tensor
    try:
        lora = LoraConfig(
            rank=table.get("r", 8),
            alpha=float(table.get("lora_alpha", 8)),
            dropout=float(table.get("lora_dropout") or 0),
            use_rslora=bool(table.get("use_rslora")),
            use_dora=bool(table.get("use_dora")),
            modules=_target_modules([target.module for target in grouped], config),
        )
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory / ADAPTER_CONFIG}: {error}") from error
    ordered = [target for target in lora_targets(config) if target in grouped]
    modules = tuple(_module(directory, target, grouped[target], lora, table) for target in ordered)
    _check_shapes(directory, modules, config)
    return Adapter(lora, modules, table.get("base_model_name_or_path"), tokens, embeddings)


def adapter_vocab_size(path: str | os.PathLike[str]) -> int:
    """The minimum vocabulary size for the trained embeddings of an adapter; 0 if it has none."""
    indices = _read_config(Path(path)).get("trainable_token_indices") or ()
    try:
        lists = indices.values() if isinstance(indices, dict) else [indices]
        sizes = [0, *(1 + int(token) for ids in lists for token in ids)]
    except (TypeError, ValueError) as error:
        raise _invalid_indices(Path(path), indices) from error
    if (file := Path(path) / ADAPTER_WEIGHTS).is_file():
        try:
            with safe_open(file, "pt") as tensors:
                names = list(tensors.keys())
                complete = [name for name in names if name.endswith(COMPLETE_SUFFIXES) and ".lora_" not in name]
                sizes += [tensors.get_slice(name).get_shape()[0] for name in complete]
        except SafetensorError as error:
            raise CheckpointError(f"cannot read {file}: {error}") from error
    return max(sizes)


def _invalid_indices(directory: Path, value: Any) -> CheckpointError:
    return CheckpointError(
        f"{directory / ADAPTER_CONFIG}: expected trainable_token_indices to be a list of token ids, or a dict of lists "
        f"by module, got {value!r}"
    )


def _embedding_modules(config: GPTConfig) -> dict[str, str]:
    """The modules of a GPT with a row for each token, by their Hugging Face names."""
    mappings = tensor_mappings(config_to_hf(config)["model_type"], config)
    names = {mapping.hf_name: mapping.name for mapping in mappings}
    modules = {hf.rpartition(".")[0]: name.rpartition(".")[0] for hf, name in names.items()}
    return {hf: name for hf, name in modules.items() if name in (EMBEDDING, HEAD)} | {HEAD: HEAD}


def _take_embeddings(
    directory: Path, table: Mapping[str, Any], tensors: dict[str, Tensor], config: GPTConfig
) -> tuple[dict[str, AdapterTokens], dict[str, Tensor]]:
    """Pop the tensors of embedding and head from `tensors`: trained rows, and complete weights.

    PEFT also saves copies for a tied head, which are ignored.
    """
    modules = {alias: name for hf, name in _embedding_modules(config).items() for alias in _aliases(hf)}
    found: dict[str, dict[str, Tensor]] = {TOKENS_SUFFIX: {}, **{suffix: {} for suffix in COMPLETE_SUFFIXES}}
    for name in list(tensors):
        for suffix, by_module in found.items():
            module = modules.get(name.removeprefix(PREFIX).removesuffix(suffix))
            if name.endswith(suffix) and module is not None:
                tensor = tensors.pop(name)
                if module in token_modules(config):
                    by_module[module] = tensor
                break
    tokens = {}
    for module, ids in _token_ids(directory, table, modules, config).items():
        rows = found[TOKENS_SUFFIX].pop(module, None)
        expected = [len(ids), config.embd_size]
        if rows is None or list(rows.shape) != expected:
            got = "none" if rows is None else list(rows.shape)
            raise CheckpointError(
                f"{directory}: expected rows of trainable tokens of shape {expected} for {module}, got {got}"
            )
        tokens[module] = AdapterTokens(ids, rows)
    for module in found[TOKENS_SUFFIX]:
        raise CheckpointError(
            f"{directory}: unexpected trained rows for {module}, which is not in trainable_token_indices"
        )
    embeddings = {module: tensor for suffix in COMPLETE_SUFFIXES for module, tensor in found[suffix].items()}
    for module, tensor in embeddings.items():
        if tensor.ndim != 2 or tensor.shape[1] != config.embd_size or len(tensor) > config.vocab_size:
            expected = [config.vocab_size, config.embd_size]
            raise CheckpointError(
                f"{directory}: expected {module} of shape {expected}, got {list(tensor.shape)}: use the base model "
                "that the adapter was trained on"
            )
    return tokens, embeddings


def _token_ids(
    directory: Path, table: Mapping[str, Any], modules: Mapping[str, str], config: GPTConfig
) -> dict[str, tuple[int, ...]]:
    """The ids in `trainable_token_indices` by module; a plain list is for the embedding, and a head tied to it."""
    indices = table.get("trainable_token_indices") or {}
    by_name = indices if isinstance(indices, dict) else {"": indices}
    ids: dict[str, tuple[int, ...]] = {}
    for name, values in by_name.items():
        matching = [module for hf, module in modules.items() if hf == name or hf.endswith(f".{name}")]
        module = EMBEDDING if name == "" else next(iter(matching), None)
        valid = isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
        if module is None or not valid or len(set(values)) != len(values):
            raise _invalid_indices(directory, indices)
        if outside := [token for token in values if not 0 <= token < config.vocab_size]:
            raise CheckpointError(
                f"{directory}: expected trainable tokens from 0 to {config.vocab_size - 1}, got {outside[0]}: resize "
                "the vocabulary of the model first, or use the base model that the adapter was trained on"
            )
        ids[module] = tuple(values)
    if config.tied_head and HEAD in ids and ids.pop(HEAD) != ids.get(EMBEDDING):
        raise CheckpointError(f"{directory}: expected the same trainable tokens for a tied head, got {indices}")
    return ids


def _aliases(module: str) -> set[str]:
    return {module, *(module.removeprefix(prefix) for prefix in BARE_PREFIXES)}


def _read_config(directory: Path) -> dict[str, Any]:
    if not (directory / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"{directory} has no {ADAPTER_CONFIG}: expected the directory of a PEFT adapter")
    table = read_json(directory / ADAPTER_CONFIG)
    for name, values in ALLOWED.items():
        if (value := table.get(name)) not in values:
            expected = " or ".join(map(repr, (value for value in values if value is not None)))
            raise CheckpointError(f"{directory / ADAPTER_CONFIG}: expected {name} = {expected}, got {value!r}")
    known = {*READ, *SHOWN_BY_TENSORS, *WITHOUT_EFFECT, *ALLOWED, *UNUSED_WITH_INIT}
    for name in (name for name in table if name not in known and table[name] not in (None, False, "", [], {})):
        raise CheckpointError(f"{directory / ADAPTER_CONFIG}: {name} = {table[name]!r} is not supported")
    return table


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    path = directory / ADAPTER_WEIGHTS
    if not path.is_file():
        pickled = (directory / "adapter_model.bin").is_file()
        hint = ", found only adapter_model.bin (pickle): save it again with a newer PEFT" if pickled else ""
        raise CheckpointError(f"{directory} has no {ADAPTER_WEIGHTS}{hint}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not tensors:
        raise CheckpointError(f"{path} has no tensors")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"{path}: expected floating-point tensors, got {tensor.dtype} in '{name}'")
    return tensors


def _parse_name(directory: Path, name: str) -> tuple[str, str]:
    """Module and parameter of a tensor: model.layers.0.self_attn.q_proj, lora_A."""
    for parameter in SUFFIXES:
        match = re.fullmatch(rf"(?:base_model\.model\.)?(.+)\.{parameter}(?:\.weight)?", name)
        if match is not None:
            return match[1], parameter
    raise CheckpointError(f"{directory / ADAPTER_WEIGHTS}: tensor '{name}' is not supported: expected LoRA weights")


def _module(
    directory: Path, target: LoraTarget, tensors: Mapping[str, Tensor], lora: LoraConfig, table: Mapping[str, Any]
) -> AdapterModule:
    required = {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if lora.use_dora else set())
    for parameter in sorted(required ^ tensors.keys()):
        state = "missing" if parameter in required else "unexpected (use_dora is not set)"
        raise CheckpointError(f"{directory / ADAPTER_WEIGHTS}: {parameter} of {target.module} is {state}")
    rank = _of_pattern(table.get("rank_pattern"), target.module, lora.rank)
    alpha = float(_of_pattern(table.get("alpha_pattern"), target.module, lora.alpha))
    if tensors["lora_A"].shape[:1] != (rank,):
        raise CheckpointError(
            f"{directory}: expected rank {rank} for {target.module} ({ADAPTER_CONFIG}), got {len(tensors['lora_A'])}"
        )
    magnitude = tensors.get("lora_magnitude_vector")
    return AdapterModule(target, tensors["lora_A"], tensors["lora_B"], magnitude, alpha, lora.scaling(int(rank), alpha))


def _of_pattern(patterns: Any, module: str, default: float) -> float:
    """The value of the first pattern that matches the end of a module name, at a dot."""
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


def _check_shapes(directory: Path, modules: tuple[AdapterModule, ...], config: GPTConfig) -> None:
    with torch.device("meta"):
        model = GPT(config)
    for module in modules:
        weight = model.get_parameter(f"{module.target.linear}.weight")
        rows, rank = module.target.stop - module.target.start, len(module.down)
        expected = {"lora_A": [rank, weight.shape[1]], "lora_B": [rows, rank], "lora_magnitude_vector": [rows]}
        found = {"lora_A": module.down, "lora_B": module.up, "lora_magnitude_vector": module.magnitude}
        for name, tensor in found.items():
            if tensor is not None and list(tensor.shape) != expected[name]:
                raise CheckpointError(
                    f"{directory}: expected {name} of {module.target.module} of shape {expected[name]}, got "
                    f"{list(tensor.shape)}: use the base model that the adapter was trained on"
                )


def load_adapter(model: GPT, path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> LoraConfig:
    """Add the adapter of a directory to a model in place, as `apply_lora` does; returns its config."""
    adapter = read_adapter(path, model.config)
    ranks = {module.target.module: (len(module.down), module.alpha) for module in adapter.modules}
    tokens = {module: tokens.ids for module, tokens in adapter.tokens.items()}
    _copy_embeddings(model, adapter)
    apply_lora(model, adapter.config, dtype=dtype, ranks=ranks, tokens=tokens)
    _copy_tensors(model, adapter)
    return adapter.config


def load_adapter_weights(model: GPT, path: str | os.PathLike[str]) -> None:
    """Load the weights of a directory into the adapters that a model has; raises if their settings differ."""
    adapter = read_adapter(path, model.config)
    current = find_lora_config(model)
    if current is None:
        raise ConfigError(f"expected a model with adapters to load {path} into: use load_adapter")
    settings, saved = _settings(model), {module.target.module: _shape(module) for module in adapter.modules}
    tokens = {name: module.tokens for name, module in trainable_tokens(model).items()}
    if tokens != {name: saved.ids for name, saved in adapter.tokens.items()}:
        raise CheckpointError(
            f"{path} has different trainable tokens from this model: use the same tokenizer and template"
        )
    if settings != saved or (current.use_rslora, current.use_dora) != (
        adapter.config.use_rslora,
        adapter.config.use_dora,
    ):
        raise CheckpointError(
            f"{path} has adapters of other modules, ranks or kinds than this model: use the same lora settings"
        )
    _copy_tensors(model, adapter)


def _shape(module: AdapterModule) -> tuple[int, float]:
    return len(module.down), module.alpha


@torch.no_grad()
def _copy_tensors(model: GPT, adapter: Adapter) -> None:
    """Copy tensors to parameters; each rank copies its part."""
    parameters = dict(lora_parameters(model))
    for module in adapter.modules:
        prefix = f"{module.target.linear}.adapters.{module.target.name}"
        for name, tensor in (("lora_A", module.down), ("lora_B", module.up)):
            copy_full_(parameters[f"{prefix}.{name}"].detach(), tensor)
        if module.magnitude is not None:
            copy_full_(parameters[f"{prefix}.lora_magnitude_vector"].detach(), module.magnitude)
    for name, tokens in adapter.tokens.items():
        copy_full_(parameters[f"{name}.trainable_tokens"].detach(), tokens.rows)


@torch.no_grad()
def _copy_embeddings(model: GPT, adapter: Adapter) -> None:
    """Replace the weights of embedding and head with those saved with the adapter, as PEFT does."""
    for name, tensor in adapter.embeddings.items():
        weight = model.get_parameter(f"{name}.weight")
        if hasattr(weight, "codes"):
            raise CheckpointError(f"the adapter replaces {name}, which is quantized here: use the unquantized model")
        weight[: len(tensor)] = tensor.to(weight.device, weight.dtype)


# The base model


def base_values(model: GPT, full: Callable[[Tensor], Tensor] = lambda weight: weight) -> dict[str, str]:
    """A few values of each linear layer in the blocks, for `check_base` to identify the base model of an adapter.

    `full` gathers a sharded weight.
    """
    return {
        name: " ".join(f"{value:.6g}" for value in _sample(full(weight.detach())))
        for name, weight in model.named_parameters()
        if name.startswith("transformer.h.") and name.endswith(".weight") and weight.ndim == 2
    }


def _sample(weight: Any) -> list[float]:
    parts = []
    for index in range(SAMPLED_ROWS):
        row = (2 * index + 1) * len(weight) // (2 * SAMPLED_ROWS)
        values = weight[row : row + 1]
        values = values.dequantize() if hasattr(values, "codes") else values
        parts.append(values.flatten()[index :: max(1, values.numel() // SAMPLED_COLUMNS)][:SAMPLED_COLUMNS])
    sampled: list[float] = torch.cat(parts).float().tolist()
    return sampled


def check_base(model: GPT, directory: Path, name: object) -> None:
    """Raise CheckpointError if an adapter was not trained on the weights of `model`, which was loaded from `name`.

    Differences within the precision of bf16, or of quantized weights, go unnoticed. Adapters trained by other libraries
    do not record values, and are not checked.
    """
    recorded = read_json(directory / BASE_INFO) if (directory / BASE_INFO).is_file() else {}
    if not recorded.get("values"):
        return
    before, after = (
        torch.tensor([float(value) for text in values.values() for value in text.split()])
        for values in (recorded["values"], base_values(model))
    )
    quantized = recorded.get("weights") is not None or any(hasattr(weight, "codes") for weight in model.parameters())
    limit = MAX_DIFFERENCE_QUANTIZED if quantized else MAX_DIFFERENCE
    if len(before) != len(after) or (after - before).norm() > limit * before.norm():
        raise CheckpointError(
            f"{directory} was trained on a base model with different weights than {name}: pass the original (--base)"
        )


# Writing


def save_adapter(
    model: GPT,
    path: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the adapters of a model as a PEFT directory, atomically.

    `base_model` is recorded as the path or hub id of the base model; default: `base_reference` of the path that the
    model was loaded from. `state` has tensors to save instead of the current ones, by parameter name.
    """
    table = adapter_config(model, base_model=base_model)
    tensors = dict(lora_parameters(model)) if state is None else state
    modules = _module_names(model) | {name: hf for hf, name in _embedding_modules(model.config).items()}
    stored = {}
    for name in (name for name, _ in lora_parameters(model)):
        prefix, _, parameter = name.rpartition(".")
        stored[PREFIX + modules[prefix] + SUFFIXES[parameter]] = tensors[name].detach()
    with atomic_directory(path) as directory:
        write_json(directory / ADAPTER_CONFIG, table)
        write_tensors(directory / ADAPTER_WEIGHTS, stored)


def adapter_config(model: GPT, *, base_model: str | None = None) -> dict[str, Any]:
    """The `adapter_config.json` of a model's adapters."""
    config = find_lora_config(model)
    if config is None:
        raise ConfigError("expected a model with adapters, got one without: call apply_lora first")
    settings = _settings(model)
    name, revision = (base_model, None) if base_model is not None else base_reference(model.name_or_path)
    ranks = {module: rank for module, (rank, _) in settings.items() if rank != config.rank}
    alphas = {module: _number(alpha) for module, (_, alpha) in settings.items() if alpha != config.alpha}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "r": config.rank,
        "lora_alpha": _number(config.alpha),
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "target_modules": list(_target_modules(list(settings), model.config)),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "bias": "none",
        "fan_in_fan_out": config_to_hf(model.config)["model_type"] == "gpt2",
        "modules_to_save": None,
        "trainable_token_indices": _token_indices(model),
        "init_lora_weights": True,
        "inference_mode": True,
    }


def base_reference(path: str | os.PathLike[str] | None) -> tuple[str | None, str | None]:
    """Name and revision of a base model, as an adapter records them.

    A snapshot in the huggingface_hub cache is recorded by its Hub id, other directories by absolute path.
    """
    if path is None or not Path(path).exists():
        return None if path is None else str(path), None
    directory = Path(path).resolve()
    repository, folder, revision = ("", *directory.parts)[-3:]
    if folder == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/"), revision
    return str(directory), None


def _token_indices(model: GPT) -> list[int] | dict[str, list[int]] | None:
    """`trainable_token_indices`: a list for the embedding and a tied head, else a list for each module."""
    ids = {name: list(module.tokens) for name, module in trainable_tokens(model).items()}
    if ids.keys() <= {EMBEDDING}:
        return ids.get(EMBEDDING)
    modules = {name: hf.rpartition(".")[2] for hf, name in _embedding_modules(model.config).items()}
    return {modules[name]: tokens for name, tokens in ids.items()}


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _module_names(model: GPT) -> dict[str, str]:
    """The Hugging Face module of each adapter, by the name of the adapter in the model."""
    return {f"{target.linear}.adapters.{target.name}": target.module for target in lora_targets(model.config)}


def _settings(model: GPT) -> dict[str, tuple[int, float]]:
    """Rank and alpha of each adapter, by Hugging Face module."""
    modules = _module_names(model)
    return {
        modules[f"{name}.adapters.{part}"]: (adapter.rank, adapter.alpha)  # type: ignore[misc]
        for name, linear in lora_linears(model)
        for part, adapter in linear.adapters.items()
    }


def _target_modules(modules: list[str], config: GPTConfig) -> tuple[str, ...]:
    """The shortest names that select exactly these modules: q_proj if all layers have it, else full names."""
    chosen, every = set(modules), [target.module for target in lora_targets(config)]
    names: set[str] = set()
    for module in modules:
        short = module.rpartition(".")[2]
        same = [other for other in every if other.endswith(f".{short}")]
        names.add(short if chosen.issuperset(same) else module)
    return tuple(sorted(names))
