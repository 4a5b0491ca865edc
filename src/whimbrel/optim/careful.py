"""What every optimizer of ours does before it moves anything."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.utils import get_total_norm

from whimbrel.base.errors import NoSparseGradientError

__all__ = ["Careful", "run_eagerly"]

run_eagerly = _disable_dynamo  # as torch.compiler.disable, without importing the compiler along with this module
"""Run a function, and everything it calls, eagerly under `torch.compile`.

A parameter that is reached by two paths (as a key of `state` and as `slot.parameter`) is guarded by one of them only,
so code compiled for one parameter would be applied to all others of its shape. Code that looks tensors up by keys and
slots must not be traced. Little is lost: step counts are read on the host, which breaks the graph at every parameter.
"""


class Careful(torch.optim.Optimizer):
    """Runs the closure with gradients on, refuses sparse gradients, and leaves out a step that has one not finite."""

    skipped: int = 0
    """Steps that were left out since a gradient was not finite."""
    skip_nonfinite: bool = True
    """Whether they are left out, for which a GPU must be waited for once a step; False where the caller sees to it, as
    the trainer does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; of none where one of them is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = self._gradients()
        if any(grad.layout is not torch.strided for grad in grads):
            raise NoSparseGradientError(type(self).__name__)
        if self.skip_nonfinite and not self._finite(grads):
            self.skipped += 1
        else:
            self._move_all()
        return loss

    def _gradients(self) -> list[Tensor]:
        """All that the step goes by."""
        params = (p for group in self.param_groups for p in group["params"])
        return [p.grad for p in params if p.grad is not None and p.numel()]

    def _finite(self, grads: list[Tensor]) -> bool:
        """Whether all of them are finite; by their largest numbers, since a norm may be beyond what 16 bits hold."""
        return bool(get_total_norm(grads, math.inf).isfinite())

    @abstractmethod
    def _move_all(self) -> None:
        """The update itself."""
