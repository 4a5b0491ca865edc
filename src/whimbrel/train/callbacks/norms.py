"""The norms of each parameter and of its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whimbrel.train.callback import TrainerCallback
from whimbrel.train.callbacks.numbers import plain_numbers
from whimbrel.train.state import TrainerControl

__all__ = ["NormsCallback"]


class NormsCallback(TrainerCallback):
    """Logs `grad_norm/NAME` (as clipped) and `weight_norm/NAME` (before the update) every so many steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._names: list[str] = []
        self._norms: Tensor | None = None

    def on_pre_optimizer_step(self, **event: Any) -> None:
        """Measure; the numbers stay on the device until the step is over."""
        if (event["state"].global_step + 1) % self._every:
            return
        pairs = [(name, own) for name, own in event["model"].named_parameters() if own.grad is not None]
        if pairs:
            self._names = [name for name, _ in pairs]
            norms = [
                *torch._foreach_norm([own.grad for _, own in pairs]),
                *(plain_numbers(own).norm() for _, own in pairs),
            ]
            self._norms = torch.stack([norm.float() for norm in norms])

    def on_step_end(self, **event: Any) -> TrainerControl | None:
        """Log what was measured in this step."""
        if self._norms is None:
            return None
        values, self._norms = self._norms.tolist(), None
        keys = [f"{kind}/{name}" for kind in ("grad_norm", "weight_norm") for name in self._names]
        control: TrainerControl = event["trainer"].log(dict(zip(keys, values, strict=True)))
        return control
