"""Fused output layer with one value per token: log-probabilities, and the KL divergence from a teacher.

As in `cross_entropy`, logits exist for one chunk of tokens at a time. The gradient of each token's value is not known
in forward, since a preference loss depends on all tokens of a sample, so backward computes the logits again. With a
frozen head (LoRA) it does not: the gradient of `hidden` is linear in that of each token, and forward has computed it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from whimbrel.base.errors import DataError
from whimbrel.ops.cross_entropy import check_targets, chunk_tokens, loss_and_gradient_

__all__ = [
    "distillation_loss_reference",
    "linear_distillation_loss",
    "linear_log_probs",
    "linear_log_probs_reference",
    "linear_top_k",
    "top_k_log_probs",
]

TokenLoss = Callable[..., Tensor]
"""`(logits, chunk, gradient=...)`: the loss of each token of a chunk (a slice) in fp32; with `gradient`, overwrites
the logits with the gradients of the summed loss."""
DISTILLATION_BUFFERS = 6
"""Memory of a chunk of logits in the distillation loss, relative to its logits: it has no fused kernel."""


def linear_log_probs_reference(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    *,
    vocab_size: int,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Reference for `linear_log_probs`, from all logits at once."""
    logits_NV = _cap(F.linear(hidden_NC, weight_VC).float()[:, :vocab_size], softcap)
    return -F.cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction="none")


@_disable_dynamo  # it cannot trace an autograd.Function that gets a function
def linear_log_probs(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    *,
    vocab_size: int,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Log-probability of each target, fp32 of shape (N,); 0 for targets that are `ignore_index`.

    Arguments are those of `linear_cross_entropy`.
    """
    check_targets(targets_N, vocab_size, ignore_index)

    def loss(logits: Tensor, chunk: slice, gradient: bool) -> Tensor:
        return loss_and_gradient_(logits, targets_N[chunk], vocab_size, softcap, ignore_index, gradient)

    return -_token_losses(hidden_NC, weight_VC, loss)


def distillation_loss_reference(
    logits_NV: Tensor, teacher_ids_NK: Tensor, teacher_log_probs_NK: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Reference for `linear_distillation_loss`, from logits and with the gradients of autograd."""
    log_q_NV = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
    log_q_NK = log_q_NV.gather(-1, teacher_ids_NK.long())
    p_NK = teacher_log_probs_NK.float().exp()
    divergence_N = (p_NK * (teacher_log_probs_NK - log_q_NK)).sum(-1)
    if teacher_ids_NK.shape[-1] < logits_NV.shape[-1]:
        rest_p_N = _rest(p_NK)
        others_NV = log_q_NV.scatter(-1, teacher_ids_NK.long(), -torch.inf)
        divergence_N = divergence_N + torch.xlogy(rest_p_N, rest_p_N) - rest_p_N * others_NV.logsumexp(-1)
    return temperature**2 * divergence_N


@_disable_dynamo  # it cannot trace an autograd.Function that gets a function
def linear_distillation_loss(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    teacher_ids_NK: Tensor,
    teacher_log_probs_NK: Tensor,
    *,
    vocab_size: int,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """KL divergence of each token's distribution from a teacher's K most probable tokens, fp32 of shape (N,).

    All other tokens are one event, which has the rest of the probability, so the divergence is a lower bound of that
    of the complete distributions, and equal to it with K = `vocab_size`. The teacher's log-probabilities are those at
    `temperature`. The divergence is multiplied by temperature^2, which keeps the scale of gradients (Hinton et al.).
    """
    if teacher_ids_NK.device.type == "cpu" and not torch.compiler.is_compiling():
        largest = int(teacher_ids_NK.max()) if teacher_ids_NK.numel() else 0
        if largest >= vocab_size:
            raise DataError(
                f"expected a teacher with the model's vocabulary ({vocab_size} tokens), got token id {largest}"
            )
    loss = partial(
        _distillation_loss_and_gradient_, teacher_ids_NK, teacher_log_probs_NK, vocab_size, softcap, temperature
    )
    return _token_losses(hidden_NC, weight_VC, loss, buffers=DISTILLATION_BUFFERS)


def _distillation_loss_and_gradient_(
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    vocab_size: int,
    softcap: float | None,
    temperature: float,
    logits: Tensor,
    chunk: slice,
    gradient: bool,
) -> Tensor:
    """The divergence; p is the teacher, q the student, and r stands for all tokens outside the top k.

    loss_n = sum_k p_k (log p_k - log q_k) + p_r (log p_r - log q_r)
    d loss / d z_j = q_j - p_j for j in the top k, and q_j - p_r q_j / q_r for the others.
    """
    ids, log_p = teacher_ids[chunk].long(), teacher_log_probs[chunk].float()
    p, z = log_p.exp(), logits.float()
    if softcap is not None:
        capped = torch.tanh(z / softcap)
        z = capped * softcap
    z = z / temperature
    z[:, vocab_size:] = -torch.inf
    lse = torch.logsumexp(z, dim=1, keepdim=True)
    log_q = z.gather(1, ids) - lse
    losses = (p * (log_p - log_q)).sum(1)
    has_rest = ids.shape[1] < vocab_size
    if has_rest:
        rest_p = _rest(p)
        rest_lse = z.scatter(1, ids, -torch.inf).logsumexp(dim=1, keepdim=True)
        losses += torch.xlogy(rest_p, rest_p) - rest_p * (rest_lse - lse).squeeze(1)
    if gradient:
        grad = (z - lse).exp_()
        if has_rest:
            grad -= rest_p[:, None] * (z - rest_lse).exp_()
        grad.scatter_(1, ids, log_q.exp() - p)
        if softcap is not None:
            grad *= 1 - capped.square_()
        logits.copy_(grad.mul_(temperature))
    return losses * temperature**2


def top_k_log_probs(logits: Tensor, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Ids (int32) and log-probabilities (fp32) of the k most probable tokens, most probable first."""
    log_probs, ids = torch.log_softmax(logits.float() / temperature, dim=-1).topk(k, dim=-1)
    return ids.int(), log_probs


@torch.no_grad()
def linear_top_k(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    k: int,
    *,
    vocab_size: int,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`top_k_log_probs` of the logits of `hidden` without materializing all of them; not differentiable."""
    if not 1 <= k <= vocab_size:
        raise DataError(f"expected k from 1 to the {vocab_size} tokens of the vocabulary, got {k}")
    rows = chunk_tokens(hidden_NC, weight_VC.shape[0] * 4 * 2)  # logits and log-probabilities in fp32
    parts = [
        top_k_log_probs(_cap(F.linear(chunk, weight_VC)[:, :vocab_size].float(), softcap), k, temperature=temperature)
        for chunk in hidden_NC.split(rows)
    ]
    ids, log_probs = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(log_probs)


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _rest(p: Tensor) -> Tensor:
    """The probability outside the top k; rounding can make it negative."""
    return (1 - p.sum(-1)).clamp(min=0)


def _token_losses(hidden: Tensor, weight: Tensor, loss: TokenLoss, *, buffers: int = 1) -> Tensor:
    """The loss of each token from the logits `hidden @ weight.T`, computed one chunk at a time."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    grad_enabled = torch.is_grad_enabled()
    needs_grad = (grad_enabled and hidden.requires_grad, grad_enabled and weight.requires_grad)
    losses = _TokenLosses.apply(hidden, weight, loss, dtype, needs_grad, buffers)  # type: ignore[no-untyped-call]
    return cast(Tensor, losses)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        loss: TokenLoss,
        dtype: torch.dtype,
        needs_grad: tuple[bool, bool],
        buffers: int,
    ) -> Tensor:
        rows = chunk_tokens(hidden, weight.shape[0] * dtype.itemsize * buffers)
        ctx.loss, ctx.dtype, ctx.rows, ctx.needs_grad = loss, dtype, rows, needs_grad
        frozen_head = needs_grad == (True, False)
        losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            hidden_cast, weight_cast = hidden.to(dtype), weight.to(dtype)
            unit_grad = torch.empty_like(hidden_cast) if frozen_head else None
            for start in range(0, hidden.shape[0], rows):
                chunk = slice(start, start + rows)
                logits = hidden_cast[chunk] @ weight_cast.T
                losses[chunk] = loss(logits, chunk, gradient=frozen_head)
                if unit_grad is not None:
                    torch.mm(logits, weight_cast, out=unit_grad[chunk])
        ctx.save_for_backward(*((unit_grad,) if frozen_head else (hidden, weight)))
        ctx.hidden_dtype = hidden.dtype
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.needs_grad == (True, False):
            (unit_grad,) = ctx.saved_tensors
            return (unit_grad * grad_losses[:, None]).to(ctx.hidden_dtype), None, None, None, None, None
        hidden, weight = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            hidden_cast, weight_cast = hidden.to(ctx.dtype), weight.to(ctx.dtype)
            grad_hidden = torch.empty_like(hidden_cast) if ctx.needs_grad[0] else None
            grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            for start in range(0, hidden.shape[0], ctx.rows):
                chunk = slice(start, start + ctx.rows)
                logits = hidden_cast[chunk] @ weight_cast.T
                ctx.loss(logits, chunk, gradient=True)
                logits.mul_(grad_losses[chunk, None])
                if grad_hidden is not None:
                    torch.mm(logits, weight_cast, out=grad_hidden[chunk])
                if logits.dtype == grad_weight.dtype:
                    grad_weight.addmm_(logits.T, hidden_cast[chunk])
                else:
                    grad_weight += logits.T @ hidden_cast[chunk]
        grad_hidden = None if grad_hidden is None else grad_hidden.to(ctx.hidden_dtype)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None
