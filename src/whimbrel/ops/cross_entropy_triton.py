"""Triton kernel for `linear_cross_entropy`: one program per row of logits, gradient written in place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["loss_and_gradient_"]

BLOCK, WARPS = 2048, 4
"""Columns per tile of a program, and its warps."""


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, losses_ptr, stride, softcap, ignore_index,
    vocab_size: tl.constexpr, width: tl.constexpr, HAS_CAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    columns = tl.arange(0, BLOCK)
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, width, BLOCK):
                offsets = start + columns
                tl.store(base + offsets, tl.zeros([BLOCK], dtype=logits_ptr.dtype.element_ty), mask=offsets < width)
        return
    # Online softmax: one running maximum per row, and a sum of exponentials per lane; lanes are summed once at the end.
    # Loads include the padding of the vocabulary, whose aligned width keeps them vectorized; it is masked afterwards.
    row_max = -1e30
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        offsets = start + columns
        z = tl.load(base + offsets, mask=offsets < width, other=0.0).to(tl.float32)
        if HAS_CAP:
            z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)
        z = tl.where(offsets < vocab_size, z, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(z, axis=0))
        total = total * tl.exp(row_max - new_max) + tl.exp(z - new_max)
        row_max = new_max
    lse = row_max + tl.log(tl.sum(total, axis=0))
    z_target = tl.load(base + target).to(tl.float32)
    if HAS_CAP:
        z_target = softcap * (2.0 * tl.sigmoid(2.0 * z_target / softcap) - 1.0)
    tl.store(losses_ptr + row, lse - z_target)
    if GRADIENT:
        tl.debug_barrier()
        for start in range(0, width, BLOCK):
            offsets = start + columns
            z = tl.load(base + offsets, mask=offsets < width, other=0.0).to(tl.float32)
            slope = tl.full([BLOCK], 1.0, dtype=tl.float32)
            if HAS_CAP:
                t = 2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0
                z = softcap * t
                slope = 1.0 - t * t
            g = (tl.exp(z - lse) - tl.where(offsets == target, 1.0, 0.0)) * slope
            g = tl.where(offsets < vocab_size, g, 0.0)
            tl.store(base + offsets, g.to(logits_ptr.dtype.element_ty), mask=offsets < width)


def loss_and_gradient_(
    logits: Tensor, targets: Tensor, vocab_size: int, softcap: float | None, ignore_index: int, gradient: bool
) -> Tensor:
    """The loss of each row; with `gradient`, overwrites `logits` with the gradient of the summed loss."""
    rows, width = logits.shape
    targets = targets.contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    kernel: Any = _row_kernel
    kernel[(rows,)](
        logits, targets, losses, logits.stride(0), softcap or 1.0, ignore_index, vocab_size=vocab_size, width=width,
        HAS_CAP=softcap is not None, GRADIENT=gradient, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses
