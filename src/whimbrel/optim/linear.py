"""A linear layer whose weight gradient never exists: only its projection does.

With Y = X W^T the gradient of W is G = dY^T X, and what an optimizer in a subspace asks for is
    R = G Q = dY^T (X Q)          (the input side is projected away: forward keeps X Q, r numbers a token, not X)
    R = G^T P = X^T (dY P)        (the output side: forward keeps X)
either way r/n or r/m of the products of G, and no matrix of the size of W. R comes as the gradient of a probe: a zero
of R's shape that takes no memory, stands for no weight, and lets autograd accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from whimbrel.optim.slot import Slot

__all__ = ["Probe", "ProjectedLinear"]


class Probe:
    """What one linear layer projects its weight gradient by, and where the projection arrives.

    `sketch` is a few random directions of the projected side, by which the length of what R leaves out is estimated.
    """

    def __init__(self, slot: Slot, stored: tuple[Tensor, ...], sketch: Tensor, dtype: torch.dtype) -> None:
        assert slot.rank is not None
        assert slot.basis_codec is not None
        self.stored, self.codec, self.rank, self.sketch = stored, slot.basis_codec, slot.rank, sketch
        self.transposed = slot.transposed
        self.on = True
        """Off in a step that needs the whole gradient."""
        self.low = _nothing(slot.low_shape, sketch.device, dtype)
        self.sketched = _nothing((slot.shape[-2], sketch.shape[-1]), sketch.device, dtype)

    def basis(self) -> Tensor:
        """Q or P, beside the directions of the sketch."""
        return torch.cat((self.codec.decode(self.stored, self.rank), self.sketch), dim=-1)


class ProjectedLinear(nn.Linear):
    """A linear layer that has a probe; `nn.Linear` itself wherever no gradient is asked for."""

    probe: Probe

    def forward(self, x: Tensor) -> Tensor:
        """As a linear layer; its weight gets no gradient where the probe gets its projection."""
        probe = self.probe
        if not (probe.on and torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(x)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y: Tensor = _Project.apply(  # type: ignore[no-untyped-call]
            x.to(dtype), self.weight, self.bias, probe.basis().to(dtype), probe.low, probe.sketched, probe.transposed
        )
        return y


def _nothing(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A leaf of any shape over one number, for the gradient that it gets."""
    return torch.empty_strided(shape, (0,) * len(shape), device=device, dtype=dtype).requires_grad_()


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        basis: Tensor,
        low: Tensor,
        sketched: Tensor,
        transposed: bool,
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
            ctx.save_for_backward(weight, x if transposed else x @ basis, basis if transposed else None)
        ctx.rank, ctx.kinds = low.shape[-1], (low.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        weight, kept, basis = ctx.saved_tensors
        low_dtype, bias_dtype = ctx.kinds
        with torch.autocast(grad_y.device.type, enabled=False):
            grad_x = grad_y @ weight.to(grad_y.dtype) if ctx.needs_input_grad[0] else None
            rows, kept = (t.reshape(-1, t.shape[-1]) for t in (grad_y, kept))
            both = (rows.mT @ kept if basis is None else kept.mT @ (rows @ basis)).to(low_dtype)
            low, sketched = both[:, : ctx.rank].contiguous(), both[:, ctx.rank :].contiguous()
            grad_bias = (
                rows.sum(dim=0, dtype=bias_dtype) if bias_dtype is not None and ctx.needs_input_grad[2] else None
            )
        return grad_x, None, grad_bias, None, low, sketched, None
