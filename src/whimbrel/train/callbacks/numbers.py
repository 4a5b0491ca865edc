"""Weights as those who watch a run want them: as the numbers that they stand for."""

from __future__ import annotations

from torch import Tensor

from whimbrel.precision import QuantizedWeight

__all__ = ["plain_numbers"]


def plain_numbers(weight: Tensor) -> Tensor:
    """The weight itself, or, where it is stored as codes, what these stand for."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.detach()
