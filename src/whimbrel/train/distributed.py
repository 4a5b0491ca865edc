"""Refuses what needs several processes: each would train the same data into the same directory."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import nn

from whimbrel.base.errors import ConfigError

__all__ = ["check_single_process", "refuse_wrapped_model"]

WRAPPERS = {"DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}
"""Modules of torch that put a model on several devices."""


def check_single_process() -> None:
    """Raise ConfigError in one of several processes, by torchrun's WORLD_SIZE or by the process group."""
    given = os.environ.get("WORLD_SIZE", "")
    size, source = (int(given) if given.isdigit() else 1), f"WORLD_SIZE={given}"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        size, source = dist.get_world_size(), f"a process group of {dist.get_world_size()}"
    if size > 1:
        raise ConfigError(f"distributed training is not supported yet: expected one process, got {source}")


def refuse_wrapped_model(model: nn.Module) -> None:
    """Raise ConfigError for a model that is wrapped by, or sharded with, DDP, FSDP or DataParallel, or has DTensors."""
    for module in model.modules():
        kind = _torch_class(type(module), WRAPPERS)
        if kind is not None:
            raise ConfigError(f"distributed training is not supported yet: expected an unwrapped model, got a {kind}")
    for name, parameter in model.named_parameters():
        if _torch_class(type(parameter.data), {"DTensor"}) or _torch_class(type(parameter), {"DTensor"}):
            raise ConfigError(
                f"distributed training is not supported yet: expected plain parameters, got a DTensor for '{name}'"
            )


def _torch_class(kind: type, names: set[str]) -> str | None:
    """The base class of torch that has one of the names; its modules are not imported to find out."""
    return next(
        (base.__name__ for base in kind.__mro__ if base.__name__ in names and base.__module__.startswith("torch.")),
        None,
    )
