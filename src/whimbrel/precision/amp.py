"""Mixed precision: what runs in 16 bits, and how small gradients survive it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from whimbrel.base.errors import PrecisionError

__all__ = ["DTYPES", "PrecisionPlan"]

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What each precision runs its products in."""


class PrecisionPlan:
    """fp32: as it is; bf16: autocast; fp16: autocast, and a loss scaled so that small gradients do not vanish.

    Weights and optimizer state stay as they are in every plan. A plan has state under fp16 alone: the scale.
    """

    def __init__(self, precision: Literal["fp32", "bf16", "fp16"], device: torch.device) -> None:
        if precision not in DTYPES:
            raise PrecisionError(f"precision = {precision!r} is not one of {', '.join(DTYPES)}")
        self.precision, self.device, self.dtype = precision, device, DTYPES[precision]
        _check_device(precision, device)
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """What forward passes run under."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring complete gradients to their own size, to be measured and clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Move the weights and say so; under fp16 not where a gradient overflowed, after which the scale is smaller."""
        if self.scaler is None:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def skip(self) -> None:
        """Leave out the step whose gradients were unscaled."""
        if self.scaler is not None:
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """The scale and its growth; empty without a scaler."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the scale of a run that went on under fp16; one that did not leaves it as it is."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def _check_device(precision: str, device: torch.device) -> None:
    """Refuse 16 bits on hardware that has none of that kind."""
    other = {"bf16": "fp16", "fp16": "bf16"}.get(precision)
    if other is None:
        return
    if device.type == "cuda" and precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        major, minor = torch.cuda.get_device_capability(device)
        raise PrecisionError(
            f"precision = bf16 needs a GPU of compute capability 8.0, and this one has {major}.{minor}: use {other}"
        )
    try:
        with torch.autocast(device.type, dtype=DTYPES[precision]):
            torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    except RuntimeError as error:
        raise PrecisionError(
            f"precision = {precision} does not run on {device.type} ({error}): use {other} or fp32"
        ) from error
