"""Output layer and cross-entropy with the matmuls in fp8.

As in `cross_entropy`, the logits of a chunk of tokens become its gradients right away. The gradient of a logit is
between -1 and 1, so its scale is a constant. fp8 matmuls cannot add to their output, so the gradient of the weight is
computed for several chunks at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whimbrel.ops.cross_entropy import check_targets, chunk_tokens
from whimbrel.ops.fp8 import E4M3, E5M2, DelayedScaling, Fp8, cast_weights, fp8_kernels, fp8_linear

__all__ = ["linear_cross_entropy_fp8"]

GRADIENT_SCALE = 2.0**15
"""e5m2 represents magnitudes up to 57344 and down to 2^-16, so probabilities down to 2^-31."""
WEIGHT_GRADIENT_CHUNKS = 2


def linear_cross_entropy_fp8(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    scaling: DelayedScaling,
    index: int,
    *,
    vocab_size: int,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """`linear_cross_entropy` of hidden states that are cast to fp8 as the tensor `index` of `scaling`."""
    check_targets(targets_N, vocab_size, ignore_index)
    loss: Tensor = _LinearCrossEntropyFp8.apply(  # type: ignore[no-untyped-call]
        hidden_NC.contiguous(), weight_VC, targets_N.contiguous(), scaling, index, vocab_size, softcap, ignore_index
    )
    return loss


class _LinearCrossEntropyFp8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scaling: DelayedScaling, index: int,
        vocab_size: int, softcap: float | None, ignore_index: int,
    ) -> Tensor:  # fmt: skip
        kernels, dtype, loss_settings = fp8_kernels(hidden), hidden.dtype, (vocab_size, softcap, ignore_index)
        tokens, padded_vocab = hidden.shape[0], weight.shape[0]
        (h, h_transposed), h_inverse = scaling.cast(index, lambda s, lanes: kernels.cast(hidden, E4M3, s, lanes))
        ((head, head_transposed),) = cast_weights([weight])
        gradient_inverse = torch.full((), 1 / GRADIENT_SCALE, device=hidden.device)
        rows = chunk_tokens(hidden, padded_vocab * dtype.itemsize)
        losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        for first in range(0, tokens, WEIGHT_GRADIENT_CHUNKS * rows):
            last = min(first + WEIGHT_GRADIENT_CHUNKS * rows, tokens)
            transposed = torch.empty(padded_vocab, last - first, dtype=E5M2, device=hidden.device)
            for start in range(first, last, rows):
                chunk = slice(start, min(start + rows, last))
                logits = fp8_linear(Fp8(h[chunk], h_inverse), head, dtype=dtype, fast_accumulation=True)
                losses[chunk], lse = kernels.row_losses(logits, targets[chunk], *loss_settings)
                columns = transposed[:, start - first : chunk.stop - first]
                gradient = kernels.logits_gradient(logits, targets[chunk], lse, *loss_settings, GRADIENT_SCALE, columns)
                del logits  # before the matmul allocates
                grad_hidden[chunk] = fp8_linear(Fp8(gradient, gradient_inverse), head_transposed, dtype=dtype)
                del gradient  # before the next chunk is allocated
            span = h_transposed.view(torch.uint8)[:, first:last].contiguous().view(E4M3)
            part = fp8_linear(Fp8(transposed, gradient_inverse), Fp8(span, h_inverse), dtype=weight.dtype)
            grad_weight = part if grad_weight is None else grad_weight.add_(part)
            del part, transposed
        ctx.save_for_backward(grad_hidden, grad_weight)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        grad_hidden = (grad_hidden * grad_loss).to(grad_hidden.dtype)
        return grad_hidden, grad_weight.mul_(grad_loss), None, None, None, None, None, None
