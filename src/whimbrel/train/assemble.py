"""The parts of a trainer, one `build_x` each. The order of wraps is fixed in `place_model`: low-bit swap ->
device -> recompute -> compile; a checkpoint is loaded after all of them.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from whimbrel.base.errors import ConfigError
from whimbrel.distributed import apply_activation_checkpointing, find_blocks
from whimbrel.models import GPT
from whimbrel.ops.compiler import check_compiler
from whimbrel.optim import (
    Careful,
    Composed,
    OptimConfig,
    RoutedParameter,
    Schedule,
    build_optimizer,
    lr_factor,
    project_in_backward,
    route_parameters,
    step_in_backward,
)
from whimbrel.precision import prepare
from whimbrel.train.config import TrainerConfig
from whimbrel.train.loop import Scheduler
from whimbrel.train.model_state import check_can_be_saved

__all__ = [
    "build_optimizer_of",
    "build_scheduler",
    "compile_model",
    "flops_per_token",
    "keep_compiled",
    "place_model",
    "routed_parameters",
    "seed_everything",
]

logger = logging.getLogger(__name__)

COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
OptimizerChoice = Optimizer | OptimConfig | str | Callable[..., Optimizer] | None
SchedulerChoice = Scheduler | str | None


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def keep_compiled() -> None:
    """Keep compiled code where the next run finds it, also after a restart; torch settles on /tmp once it is asked.

    Call it before anything else of a run: building an optimizer is enough to make torch ask.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "whimbrel" / "compiled"
    os.environ.setdefault(COMPILE_CACHE, str(cache))


def place_model(model: nn.Module, config: TrainerConfig, device: torch.device) -> None:
    """Make linears what they are to be, bring the model to its device and wrap it; parameters stay its own."""
    train = config.train
    if train.linears is not None:
        alignment = None if train.fp8_recipe is None else train.fp8_dim_alignment
        prepare(model, train.linears, device=device, precision=train.precision, alignment=alignment)
    model.to(device)
    if train.recompute != "none":
        apply_activation_checkpointing(model, train.recompute, compiled=train.compile)
    if train.compile:
        compile_model(model, config, device)


def compile_model(model: nn.Module, config: TrainerConfig, device: torch.device) -> None:
    """Compile in place. With the scope "block" the first block is compiled for all, since they share their code."""
    if config.train.compile_backend == "inductor":
        check_compiler(device, "train.compile (torch_compile)")
    settings = {"backend": config.train.compile_backend, "mode": config.train.compile_mode}
    if settings["mode"] == "default":
        del settings["mode"]  # given with others than inductor, torch refuses it
    for part in find_blocks(model) if config.train.compile_scope == "block" else [model]:
        if type(part).__module__.startswith("torch.nn."):
            raise ConfigError(
                f"torch.compile passes over torch's own classes, and a {type(part).__name__} is one: put it into a "
                "module of your own, choose another compile_scope, or turn train.compile (torch_compile) off"
            )
        part.compile(**settings)


def build_optimizer_of(
    model: nn.Module, config: TrainerConfig, choice: OptimizerChoice, *, accumulation: int = 1
) -> Optimizer:
    """The optimizer that was given or named, or the one that the settings describe; in backward where it is to be."""
    check_can_be_saved(model)  # before anything is trained that could not be
    if choice is not None and not isinstance(choice, str) and config.optim != OptimConfig(lr=config.optim.lr):
        logger.warning("the optimizer was given: optimizer settings of the arguments do not apply")
    if isinstance(choice, Optimizer):
        optimizer = choice
    elif callable(choice):
        optimizer = choice([p for p in model.parameters() if p.requires_grad])
    else:
        settings = config.optim if choice is None else config.optim.named(choice) if isinstance(choice, str) else choice
        if config.train.optimizer_in_backward and settings.listens_to("start") and settings.start is None:
            settings = replace(settings, start="random")  # bases from the first gradients would want them all at once
        optimizer = build_optimizer(settings, routed_parameters(model), seed=config.train.seed)
        if isinstance(optimizer, Careful):
            optimizer.skip_nonfinite = False  # the loop looks at loss and norm itself, and later: no step waits
    return _in_backward(optimizer, model, config, accumulation) if config.train.optimizer_in_backward else optimizer


def _in_backward(optimizer: Optimizer, model: nn.Module, config: TrainerConfig, accumulation: int) -> Optimizer:
    """Project gradients where the optimizer moves by projections alone, else step: with nothing that needs them all."""
    train = config.train
    wrong = {"train.precision = fp16": train.precision == "fp16"}
    if isinstance(optimizer, Composed) and optimizer.projects:
        what = "train.optimizer_in_backward projects gradients before their scale is known"
    else:
        what = "train.optimizer_in_backward moves weights before the whole gradient is known"
        wrong |= {
            f"{accumulation} micro-batches a step": accumulation > 1,
            f"train.clip = {train.clip} (max_grad_norm)": train.clip is not None,
            "train.on_nonfinite = skip": train.on_nonfinite == "skip",
            f"train.projected_linears, as {type(optimizer).__name__} needs whole gradients": train.projected_linears,
        }
    for name in (name for name, given in wrong.items() if given):
        raise ConfigError(f"{what}, which does not go with {name}: turn one of them off")
    if isinstance(optimizer, Composed) and optimizer.projects:
        return project_in_backward(
            optimizer, accumulation=accumulation, model=model if train.projected_linears else None
        )
    return step_in_backward(optimizer)


def routed_parameters(model: nn.Module) -> list[RoutedParameter]:
    """Each parameter with its role; our own model also tells which matrices are fused in one."""
    splits: dict[str, tuple[int, ...]] = {}
    if isinstance(model, GPT):
        shape = model.config
        q, kv = shape.num_heads * shape.head_width, shape.kv_heads * shape.head_width
        for name, _ in model.named_parameters():
            if "c_attn" in name and name.endswith("weight"):
                splits[name] = (q, kv, kv)
            elif "c_fc" in name and name.endswith("weight") and shape.gated_mlp:
                splits[name] = (shape.mlp_width, shape.mlp_width)
    return route_parameters(model, splits)


def build_scheduler(optimizer: Optimizer, config: TrainerConfig, total: int, choice: SchedulerChoice) -> Scheduler:
    """The scheduler that was given or named, or the one that the settings describe."""
    if isinstance(choice, ReduceLROnPlateau):
        raise ConfigError("ReduceLROnPlateau steps by a metric: give a scheduler that steps by count, or its name")
    if choice is not None and not isinstance(choice, str):
        if getattr(choice, "optimizer", optimizer) is not optimizer:
            raise ConfigError("the scheduler that was given sets the rates of another optimizer: give both together")
        return choice
    schedule = config.schedule if choice is None else config.schedule.named(choice)
    return Schedule(optimizer, lambda step: lr_factor(schedule, step, total))


def flops_per_token(model: nn.Module, num_tokens: int) -> float:
    """Operations of one pass forth and back per token: 6 per parameter, and attention where its shape is known."""
    if isinstance(model, GPT):
        return model.flops_per_token(num_tokens)
    shape = getattr(model, "config", None)
    layers, width = getattr(shape, "num_hidden_layers", 0), getattr(shape, "hidden_size", 0)
    attention = 12 * layers * width * num_tokens if isinstance(layers, int) and isinstance(width, int) else 0
    return 6 * sum(p.numel() for p in model.parameters()) + attention
