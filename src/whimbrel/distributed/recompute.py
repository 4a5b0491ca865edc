"""Activations that are computed again in backward, so that forward need not keep them.

A block that recomputes gets a class of its own, made from the one it had: names, weights and the sharing of compiled
code among blocks stay as they were.
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

__all__ = ["HasBlocks", "find_blocks", "memory_budget", "recompute"]

ATEN = torch.ops.aten
KEPT = [
    ATEN.mm.default,
    ATEN.bmm.default,
    ATEN.addmm.default,
    ATEN.baddbmm.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
]
"""Products and attention: dear to compute and small to keep, so selective recomputation keeps their outputs."""


@runtime_checkable
class HasBlocks(Protocol):
    """A model that knows its blocks."""

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """Each block, first to last."""


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks a model is a stack of: those it names itself, else the members of its largest ModuleList."""
    if isinstance(model, HasBlocks):
        return list(model.blocks)
    stacks: list[nn.ModuleList] = [
        module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)
    ]
    if not stacks:
        raise ConfigError(
            f"{type(model).__name__} has no blocks: neither an attribute `blocks` nor a ModuleList, so it can be "
            "neither recomputed nor compiled block by block"
        )
    sizes = [sum(p.numel() for p in stack.parameters()) for stack in stacks]
    return list(stacks[sizes.index(max(sizes))])


def recompute(model: nn.Module, mode: str | float, *, compiled: bool = False) -> None:
    """Have `model` compute activations again in backward.

    full: all but the input of each block; selective: all but the outputs of products and attention; a number: torch's
    compiler chooses, so as to keep that share of the memory (see `memory_budget`, which must be in force).
    """
    if isinstance(mode, float):
        if not compiled:
            raise ConfigError(f"recompute = {mode} is a choice of the compiler: compile, or use full or selective")
        return
    if mode not in ("none", "full", "selective"):
        raise ConfigError(f"recompute = {mode!r} is not one of none, full, selective or a number between 0 and 1")
    own = getattr(model, "gradient_checkpointing_enable", None)
    if mode == "full" and own is not None:
        own(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    if mode != "none":
        blocks = find_blocks(model)
        if not any(getattr(type(block), "recomputes", False) for block in blocks):
            _forward_without_cache(model, blocks)
        for block in blocks:
            kind: Any = type(block)
            if not getattr(kind, "recomputes", False):
                block.__class__ = _recomputing(kind, mode == "selective")


def memory_budget(mode: str | float) -> AbstractContextManager[Any]:
    """Inside, what torch compiles keeps at most the share `mode` of its activations; a mode by name changes nothing."""
    if not isinstance(mode, float):
        return contextlib.nullcontext()
    import torch._functorch.config as functorch  # the compiler's own settings, so only where they are needed

    patched: AbstractContextManager[Any] = functorch.patch(activation_memory_budget=mode)
    return patched


def _forward_without_cache(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Have forwards with gradients run without a KV cache.

    Models of transformers fill one by default (`config.use_cache`). A block that runs again in backward would append
    its keys and values a second time and compute something else.
    """
    stacked = set(blocks)
    for module in model.modules():
        lists = (child for child in module.children() if isinstance(child, nn.ModuleList))
        if any(block in stacked for child in lists for block in child):
            names = list(inspect.signature(module.forward).parameters)
            if "use_cache" in names:
                module.register_forward_pre_hook(partial(_turn_cache_off, names), with_kwargs=True)


def _turn_cache_off(
    names: list[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not torch.is_grad_enabled():
        return None
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("past_key_values") is not None:
        raise ConfigError(
            f"recompute does not work with past_key_values in a forward of {type(module).__name__} with gradients: "
            "leave the cache out, use torch.no_grad(), or turn recompute off"
        )
    place = names.index("use_cache")
    if place < len(args):
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, kwargs | {"use_cache": False}


@cache
def _recomputing(cls: Any, selective: bool) -> Any:
    """A subclass of `cls` whose forward keeps little for backward; one for each class, so that its code is shared."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if selective:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        return checkpoint(partial(cls.forward, self), *args, **settings, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "recomputes": True, "__module__": cls.__module__})
