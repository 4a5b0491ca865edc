"""Which device's kernels a tensor is computed by."""

from __future__ import annotations

from torch import Tensor

__all__ = ["kernels_of"]


def kernels_of(tensor: Tensor) -> str:
    """The device type whose kernels `tensor` uses."""
    return "cuda" if tensor.is_cuda else tensor.device.type
