"""Products of tokens with a stored weight: `x @ weight.T + bias`, from codes and scales."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from whimbrel.precision.formats import WeightFormat, code_tokens

__all__ = ["linear", "transposed"]

LEAST_ROWS = 32
"""CUDA's product of int8 matrices wants more than 16 rows."""


def linear(x: Tensor, codes: Tensor, scales: Tensor, form: WeightFormat, bias: Tensor | None) -> Tensor:
    """The product, in the dtype of `x`. Tokens are rounded first where the format says so."""
    if form.activations in ("int8", "fp8"):
        y = _both_coded(x, codes, scales, form)
    elif form.activations is None and _scales_apart(form, x):
        y = F.linear(x, form.whole(codes, x.dtype)) * scales.to(x.dtype).flatten()  # one factor a row: after the sum
    else:
        if form.activations is not None:
            rounded, factors, zeros = code_tokens(x, form.activations)
            assert zeros is not None
            x = ((rounded.float() - zeros) * factors).to(x.dtype)
        return F.linear(x, form.decode(codes, scales).to(x.dtype), bias)
    return y if bias is None else y + bias


def transposed(y: Tensor, codes: Tensor, scales: Tensor, form: WeightFormat) -> Tensor:
    """`y @ weight`, the way back: nothing is rounded."""
    if _scales_apart(form, y):  # one factor a row: before the sum, so that the weight need not be scaled
        return (y * scales.to(y.dtype).flatten()) @ form.whole(codes, y.dtype)
    return y @ form.decode(codes, scales).to(y.dtype)


def _scales_apart(form: WeightFormat, x: Tensor) -> bool:
    """Whether codes can be multiplied as they are. In fp16 sums of them overflow, and gradients times scales vanish."""
    return form.group is None and x.dtype != torch.float16


def _both_coded(x: Tensor, codes: Tensor, scales: Tensor, form: WeightFormat) -> Tensor:
    """The product of codes with codes, scaled by row and by column."""
    tokens, factors, _ = code_tokens(x.reshape(-1, x.shape[-1]), str(form.activations))
    if form.activations == "int8":
        sums = _int8_sums(tokens, codes).float() * factors * scales.float().flatten()
    elif x.device.type == "cuda" and x.dtype == torch.bfloat16:
        sums = torch._scaled_mm(
            tokens, codes.t(), scale_a=factors, scale_b=scales.float().t().contiguous(), out_dtype=torch.bfloat16
        )
    else:
        with torch.autocast(x.device.type, enabled=False):
            sums = F.linear(tokens.float(), codes.float()) * factors * scales.float().flatten()
    return sums.to(x.dtype).reshape(*x.shape[:-1], len(codes))


def _int8_sums(tokens: Tensor, codes: Tensor) -> Tensor:
    """Exact sums of products, in int32."""
    if tokens.device.type == "cuda" and len(tokens) < LEAST_ROWS:
        padded = F.pad(tokens, (0, 0, 0, LEAST_ROWS - len(tokens)))
        return torch._int_mm(padded, codes.t())[: len(tokens)]
    return torch._int_mm(tokens, codes.t())
