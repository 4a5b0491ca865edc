"""What an optimizer must know of a parameter beyond its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from whimbrel.base.errors import OptimizerError

__all__ = ["Role", "RoutedParameter", "route_parameters"]

Role = Literal["hidden", "embedding", "head", "scalar"]
"""hidden: a matrix inside a block; embedding: a table of rows; head: an untied output; scalar: fewer than two dims."""


@dataclass(frozen=True, slots=True)
class RoutedParameter:
    """A parameter, what it does in the model, and where its rows fall into separate matrices (fused q, k, v)."""

    name: str
    parameter: nn.Parameter
    role: Role
    splits: tuple[int, ...] = ()


def route_parameters(model: nn.Module, splits: Mapping[str, tuple[int, ...]] | None = None) -> list[RoutedParameter]:
    """Each parameter of any model that is trained, once, with its role; `splits` by name, for fused matrices.

    The head is the module called lm_head, or the one a Hugging Face model names; tied to the embedding, it is that.
    """
    splits = splits or {}
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    named = getattr(model, "get_output_embeddings", None)
    head = getattr(model, "lm_head", None) if named is None else named()
    heads = {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()

    def role(parameter: nn.Parameter) -> Role:
        if parameter.ndim < 2:
            return "scalar"
        if id(parameter) in tables:
            return "embedding"
        return "head" if id(parameter) in heads else "hidden"

    routed = [
        RoutedParameter(name, parameter, role(parameter), splits.get(name, ()))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    if not routed:
        raise OptimizerError(f"{type(model).__name__} has no parameter that is trained: set requires_grad on some")
    return routed
