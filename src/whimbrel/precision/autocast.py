"""Mixed precision: autocast, and gradient scaling for fp16."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from whimbrel.base.errors import PrecisionError
from whimbrel.config import not_one_of

__all__ = ["DTYPES", "MixedPrecision"]

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Autocast dtype of each precision."""


class MixedPrecision:
    """fp32: no autocast; bf16: autocast; fp16: autocast with a `GradScaler`, so that small gradients do not underflow.

    Weights and optimizer state keep their dtype. Only fp16 has state, that of the `GradScaler`.
    """

    def __init__(self, precision: Literal["fp32", "bf16", "fp16"], device: torch.device) -> None:
        if precision not in DTYPES:
            raise PrecisionError(not_one_of("precision", precision, DTYPES))
        self.precision, self.device, self.dtype = precision, device, DTYPES[precision]
        _check_device(precision, device)
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Context manager for forward passes."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale accumulated gradients before computing their norm or clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer. False if fp16 gradients overflowed: the step is skipped and the scale reduced."""
        if self.scaler is None:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def skip(self) -> None:
        """Skip the optimizer step after `unscale`, but update the loss scale."""
        if self.scaler is not None:
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """State of the `GradScaler`; empty without one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `GradScaler`; the state of a run without fp16 is ignored."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def _check_device(precision: str, device: torch.device) -> None:
    """Raise if the hardware does not support the dtype."""
    other = {"bf16": "fp16", "fp16": "bf16"}.get(precision)
    if other is None:
        return
    if device.type == "cuda" and precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        major, minor = torch.cuda.get_device_capability(device)
        raise PrecisionError(
            f"precision = bf16: expected a GPU of compute capability 8.0 or higher, got {major}.{minor}: use {other}"
        )
    try:
        with torch.autocast(device.type, dtype=DTYPES[precision]):
            torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    except RuntimeError as error:
        raise PrecisionError(
            f"precision = {precision} is not supported on {device.type} ({error}): use {other} or fp32"
        ) from error
