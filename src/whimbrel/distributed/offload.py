"""Activations in host memory between forward and backward."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["offload_activations"]


def offload_activations(device: torch.device, *, enabled: bool = True) -> AbstractContextManager[Any]:
    """Inside, what a forward pass keeps for backward goes to the host, into pinned memory where that copies faster."""
    if not enabled:
        return contextlib.nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda", device_type=device.type)
