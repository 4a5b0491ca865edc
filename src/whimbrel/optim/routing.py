"""What an optimizer must know of a parameter beyond its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

__all__ = ["Role", "RoutedParameter"]

Role = Literal["hidden", "embedding", "head", "scalar"]
"""hidden: a matrix inside a block; embedding: a table of rows; head: an untied output; scalar: fewer than two dims."""


@dataclass(frozen=True, slots=True)
class RoutedParameter:
    """A parameter, what it does in the model, and where its rows fall into separate matrices (fused q, k, v)."""

    name: str
    parameter: nn.Parameter
    role: Role
    splits: tuple[int, ...] = ()
