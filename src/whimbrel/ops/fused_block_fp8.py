"""`fused_block.project_mlp` with the matmuls of the MLP in fp8.

The norm, GELU and the backward pass of GELU write their result only in fp8, so a step reads and writes fewer bytes than
in bf16. In bf16 remain the residual stream, the input of GELU, and what norms and attention read and write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whimbrel.ops.fp8 import E4M3, E5M2, DelayedScaling, Fp8, fp8_kernels, fp8_linear
from whimbrel.ops.fused_block import NormLinear, block_kernels, matvec, weight_gradient

__all__ = ["MLP_CASTS", "Fp8MLP", "project_mlp_fp8"]

MLP_CASTS = (E4M3, E4M3, E5M2, E5M2)
"""Formats of the tensors of a block that `DelayedScaling` scales: the norm, GELU, and the gradients of the MLP's output
and of GELU's input."""


class Fp8MLP(NamedTuple):
    """What an MLP needs to compute in fp8."""

    scaling: DelayedScaling
    first: int
    """The number of the first of its `MLP_CASTS` in `scaling`."""
    up: tuple[Fp8, Fp8]
    down: tuple[Fp8, Fp8]
    """The weights, as is and transposed."""


def project_mlp_fp8(
    x_BTC: Tensor,
    attended_BTC: Tensor,
    project: tuple[Tensor, Tensor],
    up: NormLinear,
    down_weight: Tensor,
    *,
    scale: float,
    eps: float,
    activation: str,
    fp8: Fp8MLP,
) -> tuple[Tensor, Tensor]:
    """As `project_mlp`; the weights of `fp8` replace those of the MLP, which get the gradients."""
    outputs: Any = _ProjectMLPFp8.apply(  # type: ignore[no-untyped-call]
        x_BTC, attended_BTC, *project, *up, down_weight, fp8, scale, eps, activation
    )
    return tuple(outputs)


class _ProjectMLPFp8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, project_weight: Tensor, project_bias: Tensor, norm_weight: Tensor,
        norm_bias: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, fp8: Fp8MLP, scale: float,
        eps: float, activation: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype, tanh, kernels, scaling = x.dtype, activation == "gelu_tanh", fp8_kernels(x), fp8.scaling
        project_weight, project_bias = (project_weight * scale).to(dtype), project_bias * scale
        y = attended @ project_weight.T
        (h, total, mean, rstd), h_inverse = scaling.cast(
            fp8.first,
            lambda s, lanes: kernels.add_norm(x, y, project_bias, norm_weight, norm_bias, eps, scale=s, lanes=lanes),
        )
        a = fp8_linear(Fp8(h, h_inverse), fp8.up[0], up_bias.to(dtype), dtype=dtype, fast_accumulation=True)
        (g, g_transposed), g_inverse = scaling.cast(
            fp8.first + 1, lambda s, lanes: kernels.gelu(a, tanh=tanh, scale=s, lanes=lanes)
        )
        m = fp8_linear(Fp8(g, g_inverse), fp8.down[0], dtype=dtype, fast_accumulation=True)
        ctx.save_for_backward(
            attended, total, mean, rstd, a, norm_weight, project_weight, up_weight, h, h_inverse, g_transposed,
            g_inverse, *fp8.up[1], *fp8.down[1],
        )  # fmt: skip
        ctx.scaling, ctx.first, ctx.scale, ctx.tanh = scaling, fp8.first, scale, tanh
        return total, m.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, dm: Tensor) -> tuple[Tensor | None, ...]:
        (
            attended, total, mean, rstd, a, norm_weight, project_weight, up_weight, h, h_inverse, g_transposed,
            g_inverse, *transposed_weights,
        ) = ctx.saved_tensors  # fmt: skip
        up, down = Fp8(*transposed_weights[:2]), Fp8(*transposed_weights[2:])
        kernels, scaling, wide = fp8_kernels(total), ctx.scaling, up_weight.dtype
        dm_rows = dm.flatten(0, -2).contiguous()
        (dm8, dm8_transposed), dm_inverse = scaling.cast(
            ctx.first + 2, lambda s, lanes: kernels.cast(dm_rows, E5M2, s, lanes)
        )
        ddown = fp8_linear(Fp8(dm8_transposed, dm_inverse), Fp8(g_transposed, g_inverse), dtype=wide)
        dg = fp8_linear(Fp8(dm8, dm_inverse), down, dtype=total.dtype)
        (da, da_transposed, dup_bias), da_inverse = scaling.cast(
            ctx.first + 3, lambda s, lanes: kernels.gelu_backward(dg, a, tanh=ctx.tanh, scale=s, lanes=lanes)
        )
        dup = fp8_linear(Fp8(da_transposed, da_inverse), Fp8(kernels.transpose(h), h_inverse), dtype=wide)
        dh = fp8_linear(Fp8(da, da_inverse), up, dtype=total.dtype).view_as(total)
        dx, dnorm_weight, dx_sum = block_kernels(total).norm_backward(
            dh, total, norm_weight, mean, rstd, dtotal.contiguous()
        )
        dproject = weight_gradient(dx, attended).mul_(ctx.scale)
        return (
            dx, dx @ project_weight, dproject, dx_sum * ctx.scale, dnorm_weight, matvec(dup_bias, up_weight), dup,
            dup_bias, ddown, None, None, None, None,
        )  # fmt: skip
