"""The parts of a run, one `build_x` each. The order of wraps is fixed here: initialise -> device -> compile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.data import TokenDataLoader, read_manifest
from whimbrel.models import GPT
from whimbrel.optim import Role, RoutedParameter, build_optimizer, lr_factor
from whimbrel.text import Tokenizer, load_tokenizer
from whimbrel.train.batching import accumulation_steps, default_micro_batch
from whimbrel.train.config import RunConfig
from whimbrel.train.device import Stopwatch
from whimbrel.train.loop import Loop, Position

__all__ = [
    "build_batches",
    "build_loop",
    "build_model",
    "build_validation",
    "choose_micro_batch",
    "compile_blocks",
    "find_tokenizer",
    "keep_compiled",
    "route_parameters",
]

COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
GRADIENT_AND_STATE_BYTES = 12
"""Per parameter: an fp32 gradient and Adam's two moments."""


def build_model(config: RunConfig, device: torch.device) -> GPT:
    """The model with its initial weights, drawn on the CPU so that a seed means the same on every device."""
    torch.manual_seed(config.train.seed)
    return GPT(config.model).to(device)


def keep_compiled() -> None:
    """Keep compiled code where the next run finds it, also after a restart; torch settles on /tmp once it is asked.

    Call it before anything else of a run: building an optimizer is enough to make torch ask.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "whimbrel" / "compiled"
    os.environ.setdefault(COMPILE_CACHE, str(cache))


def compile_blocks(model: GPT) -> None:
    """Compile the block: the first one for all, since they share their code."""
    for block in model.blocks:
        block.compile()


def build_batches(config: RunConfig, device: torch.device, micro_batch: int) -> TokenDataLoader:
    """The loader of the training tokens; one that the model has no row for is refused when it is read."""
    return TokenDataLoader(
        config.data.path,
        micro_batch,
        config.sequence_length,
        device=device,
        seed=config.data.shuffle_seed,
        documents=config.data.documents,
        vocab_size=config.model.vocab_size,
    )


def build_validation(config: RunConfig, device: torch.device, micro_batch: int) -> TokenDataLoader | None:
    """The loader of the held-out tokens, in the order they lie; None where there are none and none were asked for."""
    path = config.validation.path or config.data.path
    asked = config.validation.path is not None or config.validation.every is not None
    if not asked and not any(path.glob("*_val_*.bin")):
        return None
    loader = TokenDataLoader(
        path,
        config.validation.micro_batch or micro_batch,
        config.sequence_length,
        split="val",
        device=device,
        documents="join" if config.data.documents == "join" else "mask",
        vocab_size=config.model.vocab_size,
    )
    tokens = config.validation.tokens or loader.total_tokens
    if min(tokens, loader.total_tokens - 1) < loader.T:
        raise ConfigError(
            f"validation has {tokens} tokens in {path}, fewer than one sequence of {loader.T}: hold out more, or lower "
            "data.sequence_length"
        )
    return loader


def find_tokenizer(config: RunConfig, eot_id: int) -> Tokenizer | None:
    """The tokenizer that the shards were made with, for checkpoints to carry; None where it is not known."""
    path = config.data.path
    manifest, gpt2 = read_manifest(path), load_tokenizer("gpt2")
    tokenizer = load_tokenizer(path) if (path / "tokenizer.json").exists() else gpt2
    vocab_size = tokenizer.vocab_size if manifest is None else manifest.tokenizer.vocab_size
    if manifest is None and tokenizer.eot_id != eot_id:
        return None
    if manifest is not None and manifest.tokenizer.fingerprint != tokenizer.fingerprint:
        if tokenizer is gpt2:
            return None
        raise DataError(f"{path / 'tokenizer.json'} is not the tokenizer that its shards were made with: restore it")
    if vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{path} was made with a vocabulary of {vocab_size} tokens and model.vocab_size is "
            f"{config.model.vocab_size}: set --model.vocab_size={vocab_size}, or prepare with another tokenizer"
        )
    return tokenizer


def build_autocast(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What forward passes run under."""
    if config.train.precision == "fp32":
        return contextlib.nullcontext
    return partial(torch.autocast, device.type, dtype=torch.bfloat16)


def build_loop(config: RunConfig, model: GPT, batches: TokenDataLoader, device: torch.device) -> Loop:
    """The loop over these parts."""
    return Loop(
        model=model,
        optimizer=build_optimizer(config.optim, route_parameters(model)),
        batches=batches,
        accumulation=accumulation_steps(config.train.tokens_per_step, batches.B, config.sequence_length),
        total_steps=config.train.total_steps,
        lr=config.optim.lr,
        lr_factor=lambda step: lr_factor(config.schedule, step, config.train.total_steps),
        autocast=build_autocast(config, device),
        stopwatch=Stopwatch(device),
        position=Position(),
        clip=config.train.clip,
        documents=None if config.data.documents == "join" else batches.documents_of,
    )


def choose_micro_batch(config: RunConfig, model: GPT, device: torch.device) -> int:
    """The micro-batch asked for, or the one that fits beside gradients, optimizer and a chunk of logits."""
    if config.train.micro_batch is not None:
        return config.train.micro_batch
    return default_micro_batch(
        config.model,
        config.train.tokens_per_step,
        config.sequence_length,
        device,
        itemsize=2 if config.train.precision == "bf16" else 4,
        reserve=GRADIENT_AND_STATE_BYTES * model.num_parameters() + 2 * 2**30,
    )


def route_parameters(model: GPT) -> list[RoutedParameter]:
    """Each parameter of a GPT with its role, and the matrices that are fused in it."""
    config = model.config
    q, kv = config.num_heads * config.head_width, config.kv_heads * config.head_width
    routed = []
    for name, parameter in model.named_parameters():
        role: Role = "hidden"
        splits: tuple[int, ...] = ()
        if parameter.ndim < 2:
            role = "scalar"
        elif "wte" in name or "wpe" in name:
            role = "embedding"
        elif "lm_head" in name:
            role = "head"
        elif "c_attn" in name:
            splits = (q, kv, kv)
        elif "c_fc" in name and config.gated_mlp:
            splits = (config.mlp_width, config.mlp_width)
        routed.append(RoutedParameter(name, parameter, role, splits))
    return routed
