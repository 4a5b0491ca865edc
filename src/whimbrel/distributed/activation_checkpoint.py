"""Activation checkpointing: recompute activations in backward instead of storing them, or offload them to the host.

The class of a checkpointed block is replaced by a subclass. Unlike a wrapper module, this leaves parameter names, the
weights and the sharing of compiled code between blocks unchanged.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from whimbrel.base.errors import ConfigError

__all__ = [
    "HasBlocks",
    "activation_memory_budget",
    "apply_activation_checkpointing",
    "find_blocks",
    "offload_activations",
]

ATEN = torch.ops.aten
SAVED_OPS = [
    ATEN.mm.default,
    ATEN.bmm.default,
    ATEN.addmm.default,
    ATEN.baddbmm.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._flash_attention_forward.default,
]
"""Ops whose outputs selective checkpointing stores: matmuls and attention, small but slow to recompute."""


@runtime_checkable
class HasBlocks(Protocol):
    """A model that lists its transformer blocks."""

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The blocks, first to last."""


def find_blocks(model: nn.Module, *, optional: bool = False) -> list[nn.Module]:
    """The transformer blocks of a model: `model.blocks` if present, else the ModuleList with the most parameters.

    A model without blocks raises ConfigError, or has none if they are `optional`.
    """
    if isinstance(model, HasBlocks):
        return list(model.blocks)
    stacks: list[nn.ModuleList] = [
        module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)
    ]
    if not stacks and optional:
        return []
    if not stacks:
        raise ConfigError(
            f"{type(model).__name__} has no blocks: activation checkpointing and per-block "
            "compilation need an attribute `blocks` or a ModuleList"
        )
    sizes = [sum(p.numel() for p in stack.parameters()) for stack in stacks]
    return list(stacks[sizes.index(max(sizes))])


def apply_activation_checkpointing(model: nn.Module, mode: str | float, *, compiled: bool = False) -> None:
    """Make `model` recompute activations in backward. Modifies its blocks in place; a second call changes nothing.

    "full" stores only the input of each block; "selective" also the outputs of matmuls and attention. With a number,
    torch.compile decides what to store within that fraction of the memory: this function only checks `compiled`, and
    `activation_memory_budget` must be active while the model is compiled.
    """
    if isinstance(mode, float):
        if not compiled:
            raise ConfigError(f"recompute = {mode} needs torch.compile: set compile = true, or use full or selective")
        return
    if mode not in ("none", "full", "selective"):
        raise ConfigError(f"recompute: expected none, full, selective or a number between 0 and 1, got {mode!r}")
    enable_checkpointing = getattr(model, "gradient_checkpointing_enable", None)
    if mode == "full" and enable_checkpointing is not None:
        enable_checkpointing(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    if mode != "none":
        blocks = find_blocks(model)
        if not any(getattr(type(block), "recomputes", False) for block in blocks):
            _disable_kv_cache(model, blocks)
        for block in blocks:
            block_class: Any = type(block)
            if not getattr(block_class, "recomputes", False):
                block.__class__ = _checkpointed_class(block_class, mode == "selective")


def activation_memory_budget(mode: str | float) -> AbstractContextManager[Any]:
    """Context in which torch.compile stores at most the fraction `mode` of activations; named modes have no effect."""
    if not isinstance(mode, float):
        return contextlib.nullcontext()
    import torch._functorch.config as functorch  # imports the compiler stack

    patched: AbstractContextManager[Any] = functorch.patch(activation_memory_budget=mode)
    return patched


def offload_activations(device: torch.device, *, enabled: bool = True) -> AbstractContextManager[Any]:
    """Context in which tensors saved for backward are moved to host memory, pinned if `device` is CUDA."""
    if not enabled:
        return contextlib.nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda", device_type=device.type)


def _disable_kv_cache(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Disable the KV cache in forward passes with gradients.

    transformers models fill one by default (`config.use_cache`). A block recomputed in backward would append its keys
    and values a second time and return different activations.
    """
    checkpointed = set(blocks)
    for module in model.modules():
        lists = (child for child in module.children() if isinstance(child, nn.ModuleList))
        if any(block in checkpointed for child in lists for block in child):
            names = list(inspect.signature(module.forward).parameters)
            if "use_cache" in names:
                module.register_forward_pre_hook(partial(_set_use_cache_false, names), with_kwargs=True)


def _set_use_cache_false(
    names: list[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not torch.is_grad_enabled():
        return None
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if arguments.get("past_key_values") is not None:
        raise ConfigError(
            f"recompute does not support past_key_values in the forward of {type(module).__name__} with gradients: "
            "omit the cache, use torch.no_grad(), or set recompute to none"
        )
    index = names.index("use_cache")
    if index < len(args):
        return (*args[:index], False, *args[index + 1 :]), kwargs
    return args, kwargs | {"use_cache": False}


@cache
def _checkpointed_class(cls: Any, selective: bool) -> Any:
    """A subclass of `cls` with a checkpointed forward. Cached, so that blocks of one class share compiled code."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if selective:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, SAVED_OPS)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        return checkpoint(partial(cls.forward, self), *args, **settings, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "recomputes": True, "__module__": cls.__module__})
