"""Which device's kernels a tensor is computed by."""

from __future__ import annotations

from torch import Tensor

__all__ = ["kernels_of"]


def kernels_of(tensor: Tensor) -> str:
    """The device type whose kernels `tensor` takes: its own, or the one that a tensor without memory stands for.

    A step can be walked through on tensors that have shapes alone, to see what it would need on a device that is not
    here; their mode says in `stands_for` which device that is. Where a function chooses by device, it asks here.
    """
    kind: str = getattr(getattr(tensor, "fake_mode", None), "stands_for", tensor.device.type)
    return kind
