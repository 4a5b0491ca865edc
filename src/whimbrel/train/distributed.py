"""Rejects multi-process training: each process would train on the same data and write to the same directory."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import nn

from whimbrel.base.errors import ConfigError

__all__ = ["check_single_process", "refuse_wrapped_model"]

WRAPPERS = {"DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}
"""torch wrappers that spread a model over several devices."""


def check_single_process() -> None:
    """Raise ConfigError if torchrun's WORLD_SIZE or the process group says that there are several processes."""
    given = os.environ.get("WORLD_SIZE", "")
    size, source = (int(given) if given.isdigit() else 1), f"WORLD_SIZE={given}"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        size, source = dist.get_world_size(), f"a process group of {dist.get_world_size()}"
    if size > 1:
        raise ConfigError(f"distributed training is not supported yet: expected one process, got {source}")


def refuse_wrapped_model(model: nn.Module) -> None:
    """Raise ConfigError for a model that is wrapped in DDP, FSDP or DataParallel, or has DTensor parameters."""
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
    """The name of the torch base class that is in `names`, found without importing torch.distributed modules."""
    return next(
        (base.__name__ for base in kind.__mro__ if base.__name__ in names and base.__module__.startswith("torch.")),
        None,
    )
