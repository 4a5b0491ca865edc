"""What every optimizer of ours does before it moves anything."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.utils import get_total_norm

from whimbrel.base.errors import NoSparseGradientError
from whimbrel.optim.shards import all_true, local, shard_of

__all__ = ["Careful", "LARGEST", "examine", "run_eagerly"]

logger = logging.getLogger(__name__)

run_eagerly = _disable_dynamo  # as torch.compiler.disable, without importing the compiler along with this module
"""Run a function, and everything it calls, eagerly under `torch.compile`.

A parameter that is reached by two paths (as a key of `state` and as `slot.parameter`) is guarded by one of them only,
so code compiled for one parameter would be applied to all others of its shape. Code that looks tensors up by keys and
slots must not be traced. Little is lost: step counts are read on the host, which breaks the graph at every parameter.
"""

LARGEST = 1e14
"""Clamp limit for gradient elements whose squares overflow fp32: the sum of a billion such squares is still finite."""


def examine(tensors: Iterable[Tensor]) -> tuple[Tensor, bool]:
    """Whether all elements are finite, as a tensor, and whether the sum of their squares is too large for their dtype.

    The 2-norm is 20 times faster on a CPU than the maximum norm, but it overflows long before the elements do: only
    where it is not finite are they looked at by their magnitude.
    """
    known = [tensor for tensor in tensors if tensor.numel()]
    norm = get_total_norm(known, 2.0)
    huge = not bool(norm.isfinite())
    return (get_total_norm(known, math.inf) if huge else norm).isfinite(), huge


class Careful(torch.optim.Optimizer):
    """Runs the closure with gradients on, refuses sparse gradients, and skips a step with a non-finite gradient."""

    skipped: int = 0
    """Steps that were skipped because a gradient was not finite; saved and loaded with the state."""
    skip_nonfinite: bool = True
    """Whether they are skipped, which synchronizes with a GPU once a step; False where the caller checks gradients
    itself, as the trainer does."""

    _huge: bool = False
    """Whether squares of the gradients of this step do not fit into fp32, though they are finite."""

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
        self._huge = False
        if self.skip_nonfinite and not self._finite(grads):
            self._skip()
        elif self._huge:
            self._move_bounded()
        else:
            self._move_all()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As of every optimizer, with the number of skipped steps."""
        return super().state_dict() | {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of every optimizer, with the number of skipped steps."""
        super().load_state_dict(state_dict)
        self.skipped = int(state_dict.get("skipped", 0))

    @run_eagerly
    def _skip(self) -> None:
        """Count a skipped step; log the 1st, 2nd, 4th, 8th and so on, so that a diverged run does not flood the log."""
        self.skipped += 1
        if self.skipped & (self.skipped - 1) == 0:
            logger.warning(
                "%s skipped a step because a gradient is not finite (%d skipped so far)",
                type(self).__name__, self.skipped,
            )  # fmt: skip

    def _gradients(self) -> list[Tensor]:
        """All that the step goes by."""
        params = (p for group in self.param_groups for p in group["params"])
        return [p.grad for p in params if p.grad is not None and p.numel()]

    @run_eagerly
    def _finite(self, grads: list[Tensor]) -> bool:
        """Whether all gradients are finite, on all ranks that hold parts of the parameters."""
        shards = [shard_of(p) for group in self.param_groups for p in group["params"]]
        finite, self._huge = examine(map(local, grads))
        return all_true(finite, shards)

    @run_eagerly
    def _move_bounded(self) -> None:
        """Make a step by gradients whose elements are bounded; the gradients themselves stay as they are.

        Where squares overflow, second moments would be infinite: codes of them are NaN, and in fp32 no later gradient
        would ever move the weight again.
        """
        given = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        try:
            for p, grad in given.items():
                if grad.dtype != torch.float16:  # which holds nothing that large
                    p.grad = grad.clamp(-LARGEST, LARGEST)
            self._move_all()
        finally:
            for p, grad in given.items():
                p.grad = grad

    @abstractmethod
    def _move_all(self) -> None:
        """The update itself."""
