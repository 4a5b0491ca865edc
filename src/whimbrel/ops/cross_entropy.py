"""Fused output layer and loss: cross-entropy of `hidden @ weight.T` without materializing all logits.

Tokens are processed in chunks. The logits of a chunk are computed, reduced to the loss, overwritten by the gradient of
the loss, and multiplied into the gradients of `hidden` and `weight` right away. Memory is one chunk of logits, and no
matmul is computed twice. Backward only scales the gradients that forward has computed.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from whimbrel.base.errors import ConfigError, DataError

__all__ = [
    "check_targets",
    "chunk_tokens",
    "fused_loss_and_gradient_",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "loss_and_gradient_",
]

CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**20, "mps": 2**27}
"""Bytes of logits per chunk, by device type; on a CPU they fit in its cache."""
MIN_CHUNK_TOKENS = 64
"""Minimum tokens per chunk, for efficient matmuls."""


def linear_cross_entropy_reference(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    *,
    vocab_size: int,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Reference for `linear_cross_entropy`: the summed loss from all logits at once, in fp32."""
    logits_NV = torch.nn.functional.linear(hidden_NC, weight_VC).float()[:, :vocab_size]
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    return torch.nn.functional.cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction="sum")


def linear_cross_entropy(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    *,
    vocab_size: int,
    softcap: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = True,
    replaced_rows: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Sum of the cross-entropy over the targets that are not `ignore_index`, a 0-d fp32 tensor.

    Rows of `weight` beyond `vocab_size` are padding and ignored. Under autocast, matmuls use its dtype. Targets
    outside the vocabulary raise `DataError` on a CPU; on a GPU they fail a device-side assertion, as in
    `torch.nn.functional.cross_entropy`, to avoid a synchronization.
    `inplace_backward` saves memory; it must be False if the backward pass runs twice.
    `replaced_rows` are indices (R,) and rows (R, C) that replace rows of a frozen `weight`; no gradient of the size of
    `weight` is allocated for them.
    """
    check_targets(targets_N, vocab_size, ignore_index)
    device = hidden_NC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NC.dtype
    grad_enabled = torch.is_grad_enabled()
    indices, rows_RC = (None, None) if replaced_rows is None else replaced_rows
    trained = weight_VC if rows_RC is None else rows_RC
    needs_grad = (grad_enabled and hidden_NC.requires_grad, grad_enabled and trained.requires_grad)
    if rows_RC is not None and weight_VC.requires_grad:
        raise ConfigError("replaced_rows: expected a frozen weight, got one that requires gradients")
    loss = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_NC, weight_VC, rows_RC, indices, targets_N, vocab_size, softcap, ignore_index, dtype, needs_grad,
        inplace_backward,
    )  # fmt: skip
    return cast(Tensor, loss)


def check_targets(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise for ids outside the vocabulary: the loss of padding rows is infinite, beyond them it is undefined."""
    if targets.is_meta or getattr(targets, "fake_mode", None) is not None:
        return
    invalid = (targets != ignore_index) & ((targets < 0) | (targets >= vocab_size))
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        if bool(invalid.any()):
            raise DataError(
                f"expected target ids from 0 to vocab_size - 1 = {vocab_size - 1}, or {ignore_index} to ignore a "
                f"position, got {int(targets[invalid][0])}: use the model's tokenizer"
            )
    else:
        torch._assert_async(~invalid.any(), f"a target id is outside the vocabulary of {vocab_size} tokens")


def chunk_tokens(hidden: Tensor, bytes_per_token: int) -> int:
    """Tokens per chunk of logits that take `bytes_per_token`; on a GPU a power of two, a multiple of matmul tiles."""
    chunk_bytes = CHUNK_BYTES.get("cuda" if hidden.is_cuda else hidden.device.type, 2**27)
    tokens = max(MIN_CHUNK_TOKENS, chunk_bytes // bytes_per_token)
    return 1 << (tokens.bit_length() - 1) if hidden.is_cuda else tokens // MIN_CHUNK_TOKENS * MIN_CHUNK_TOKENS


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        replaced: Tensor | None,
        indices: Tensor | None,
        targets: Tensor,
        vocab_size: int,
        softcap: float | None,
        ignore_index: int,
        dtype: torch.dtype,
        needs_grad: tuple[bool, bool],
        inplace_backward: bool,
    ) -> Tensor:
        device, trained = hidden.device.type, weight if replaced is None else replaced
        with torch.autocast(device, enabled=False):
            hidden_cast, weight_cast = hidden.to(dtype), weight.to(dtype)
            trained_cast = weight_cast if replaced is None else replaced.to(dtype)
            grad_hidden = torch.empty_like(hidden_cast) if needs_grad[0] else None
            losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
            rows = chunk_tokens(hidden, weight.shape[0] * dtype.itemsize)
            # Several chunks are accumulated in fp32. One chunk needs no accumulation, which saves memory.
            grad_dtype = trained.dtype if rows >= hidden.shape[0] else torch.promote_types(trained.dtype, torch.float32)
            grad_weight = torch.zeros_like(trained, dtype=grad_dtype) if needs_grad[1] else None
            for start in range(0, hidden.shape[0], rows):
                chunk = slice(start, start + rows)
                logits = hidden_cast[chunk] @ weight_cast.T
                if indices is not None:
                    logits.index_copy_(1, indices, hidden_cast[chunk] @ trained_cast.T)
                losses[chunk] = loss_and_gradient_(
                    logits, targets[chunk], vocab_size, softcap, ignore_index, any(needs_grad)
                )
                grad_logits = logits
                if indices is not None and any(needs_grad):
                    grad_logits = logits[:, indices]
                    logits.index_fill_(1, indices, 0)
                if grad_hidden is not None:
                    torch.mm(logits, weight_cast, out=grad_hidden[chunk])
                    if indices is not None:
                        grad_hidden[chunk].addmm_(grad_logits, trained_cast)
                if grad_weight is not None:
                    if grad_logits.dtype == grad_weight.dtype:
                        grad_weight.addmm_(grad_logits.T, hidden_cast[chunk])
                    elif _accumulates_in_matmul(grad_logits, grad_weight):
                        arguments = grad_weight, grad_logits.T, hidden_cast[chunk], grad_weight.dtype
                        torch.ops.aten.addmm.dtype_out(*arguments, out=grad_weight)
                    else:
                        grad_weight += grad_logits.T @ hidden_cast[chunk]
                del logits, grad_logits  # before the next chunk is allocated
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes, ctx.inplace, ctx.replaces = (hidden.dtype, trained.dtype), inplace_backward, indices is not None
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad_loss).to(hidden_dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_loss) if ctx.inplace else grad_weight * grad_loss
            grad_weight = grad_weight.to(weight_dtype)
        grads = (None, grad_weight) if ctx.replaces else (grad_weight, None)
        return grad_hidden, *grads, None, None, None, None, None, None, None, None


def _accumulates_in_matmul(x: Tensor, total: Tensor) -> bool:
    """Whether `addmm` can add the product of 16-bit matrices to an fp32 total: on a GPU, not on a simulated one."""
    return type(x) is Tensor and x.is_cuda and x.dtype.itemsize == 2 and total.dtype is torch.float32


def fused_loss_and_gradient_(
    logits: Tensor, targets: Tensor, vocab_size: int, softcap: float | None, ignore_index: int, gradient: bool
) -> Tensor:
    """`loss_and_gradient_` in one Triton kernel; a TorchFunctionMode can override it, like any torch function."""
    if not torch.compiler.is_compiling() and has_torch_function_unary(logits):
        arguments = (logits, targets, vocab_size, softcap, ignore_index, gradient)
        return handle_torch_function(fused_loss_and_gradient_, (logits,), *arguments)
    from whimbrel.ops import cross_entropy_triton

    return cross_entropy_triton.loss_and_gradient_(logits, targets, vocab_size, softcap, ignore_index, gradient)


def loss_and_gradient_(
    logits: Tensor, targets: Tensor, vocab_size: int, softcap: float | None, ignore_index: int, gradient: bool
) -> Tensor:
    """The loss of each row; with `gradient`, overwrites `logits` with the gradient of the summed loss."""
    if logits.is_cuda:
        return fused_loss_and_gradient_(logits, targets, vocab_size, softcap, ignore_index, gradient)
    z = logits.float()
    if softcap is not None:
        capped = torch.tanh(z / softcap)
        z = capped * softcap
    z[:, vocab_size:] = -torch.inf
    valid = targets != ignore_index
    index = torch.where(valid, targets, 0)[:, None]
    lse = torch.logsumexp(z, dim=1, keepdim=True)
    losses = torch.where(valid, (lse - z.gather(1, index)).squeeze(1), 0.0)
    if gradient:
        p = z.sub_(lse).exp_().mul_(valid[:, None])
        p.scatter_add_(1, index, -valid[:, None].to(p.dtype))
        if softcap is not None:
            p *= 1 - capped.square_()
        logits.copy_(p)
    return losses
