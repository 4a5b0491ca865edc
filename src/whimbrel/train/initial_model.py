"""The model that a run starts from: random weights, or those in `model.path`, with the adapters of `[lora]`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from whimbrel.base.errors import ConfigError
from whimbrel.base.files import format_bytes
from whimbrel.checkpoint import list_checkpoints
from whimbrel.distributed import World
from whimbrel.distributed.deferred_init import defer_loading, deferred_init
from whimbrel.distributed.strategy import splits
from whimbrel.model_io import load_base_model, load_weights, locate_model, read_config
from whimbrel.models import GPT, apply_lora, resize_vocabulary
from whimbrel.models.lora import initialize_lora, token_modules
from whimbrel.precision import QuantizedWeight, torch_flags
from whimbrel.train.config import TrainerConfig
from whimbrel.train.run_config import RunConfig

__all__ = ["add_adapters", "create_model", "has_checkpoint", "init_model", "initial_model", "resize"]

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


def initial_model(
    config: RunConfig,
    world: World,
    device: torch.device,
    vocab_size: int | None = None,
    added_tokens: Sequence[int] = (),
) -> GPT:
    """The model that a run starts from, with a vocabulary of at least `vocab_size` tokens.

    With `[lora]`, the embeddings of `added_tokens` are trained, too. Weights are on the CPU or deferred
    (`create_model`), except those that `model.weights` quantizes, which are on the device.
    """
    path = config.model.path
    if not _defers(config, world) and config.model.weights is None:
        _check_host_memory(config)
    if path is None or (config.lora is None and has_checkpoint(config) and not path.exists()):
        # A checkpoint replaces the weights anyway.
        return create_model(partial(_init_resized, config, vocab_size), config, world)
    model = _load_model(path, config, world, device, vocab_size, added_tokens)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedWeight) and config.lora is None:
            raise ConfigError(
                f"expected unquantized weights in model.path = {path}, got {parameter.format.name} for {name}: start "
                "from the original model, or train adapters ([lora])"
            )
    logger.info("Starting from the weights in %s", path)
    return model


def has_checkpoint(config: RunConfig) -> bool:
    """Whether the run resumes from a checkpoint."""
    return config.resume.path is not None or (
        not config.overwrite_output_dir and bool(list_checkpoints(config.output_dir))
    )


def create_model(create: Callable[[], Model], config: TrainerConfig, world: World) -> Model:
    """The model that `create` returns; if it is sharded, `wrap_model` allocates each rank's parameters later.

    Weights that are stored quantized (train.weight_dtype) are not deferred: they are quantized before sharding.
    """
    return deferred_init(create) if _defers(config, world) else create()


def init_model(config: RunConfig) -> GPT:
    """A model with random weights, seeded by `train.seed`, on torch's default device (reproducible on the CPU)."""
    torch.manual_seed(config.train.seed)
    with torch_flags(default_dtype=config.train.default_dtype):
        return GPT(config.model.architecture)


def _init_resized(config: RunConfig, vocab_size: int | None) -> GPT:
    return resize(init_model(config), vocab_size)


def _defers(config: TrainerConfig, world: World) -> bool:
    return splits(world, config.parallel) and config.train.weight_dtype is None


def add_adapters(model: GPT, config: RunConfig, added_tokens: Sequence[int]) -> None:
    """Add the adapters of `[lora]`, if any, and trainable rows for `added_tokens`."""
    if config.lora is not None:
        tokens = dict.fromkeys(token_modules(model.config), added_tokens) if added_tokens else None
        apply_lora(model, config.lora, seed=config.train.seed, tokens=tokens)


def _load_model(
    path: Path,
    config: RunConfig,
    world: World,
    device: torch.device,
    vocab_size: int | None,
    added_tokens: Sequence[int],
) -> GPT:
    """The model in `path` with its adapters; if it is sharded, `wrap_model` loads each rank's part later."""
    dtype, location = getattr(torch, config.train.default_dtype or "float32"), locate_model(path)
    weights, source = config.model.weights, location.directory
    stored = None if source.is_file() or location.is_adapter else read_config(source)
    grows = stored is not None and vocab_size is not None and vocab_size > stored.config.vocab_size
    if not _defers(config, world) or stored is None or stored.weight_format is not None or weights or grows:
        model = load_base_model(location, dtype=dtype, quantize=weights, device=None if weights is None else device)
        resize(model, vocab_size)
        add_adapters(model, config, added_tokens)
    else:
        with torch.device("meta"):
            model = GPT(stored.config).to(dtype)
        add_adapters(model, config, added_tokens)

        def load(model: nn.Module) -> None:
            assert isinstance(model, GPT)
            load_weights(model, source)
            if config.lora is not None:
                initialize_lora(model, config.train.seed)

        defer_loading(model, load)
    model.set_dropout(config.model.dropout)
    model.name_or_path = str(source)  # for a run, its checkpoint: later ones have different weights
    return model


def resize(model: GPT, vocab_size: int | None) -> GPT:
    return (
        model if vocab_size is None or vocab_size <= model.config.vocab_size else resize_vocabulary(model, vocab_size)
    )


def _check_host_memory(config: RunConfig) -> None:
    itemsize = torch.empty(0, dtype=getattr(torch, config.train.default_dtype or "float32")).itemsize
    needed, memory = config.model.matrix_parameters * itemsize, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ConfigError(
            f"the model has {config.model.matrix_parameters:,} parameters ({format_bytes(needed)}), more than this "
            f"machine's memory ({format_bytes(memory)}): choose a smaller model, or train.default_dtype = 'bfloat16'"
        )
