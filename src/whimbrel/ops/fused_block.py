"""Forward and backward pass of a pre-norm block, written by hand around attention, for training on a GPU.

`add_norm_qkv` adds the output of the previous block to the residual stream, normalizes it and projects it to queries,
keys and values; `project_mlp` projects the output of attention, adds it, normalizes, and applies the MLP, whose output
the next block adds. Between matmuls there is one kernel, which reads and writes each tensor once; its backward pass
also sums the columns, which are the gradients of biases and norms. Gradients of weights are accumulated in fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

__all__ = ["NormLinear", "add_norm", "add_norm_qkv", "block_kernels", "matvec", "project_mlp", "weight_gradient"]


class NormLinear(NamedTuple):
    """The parameters of a layer norm and of the linear layer after it."""

    norm_weight: Tensor
    norm_bias: Tensor
    weight: Tensor
    bias: Tensor


def add_norm_qkv(
    x_BTC: Tensor, y_BTC: Tensor | None, y_bias: Tensor | None, layer: NormLinear, *, num_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`x + y + y_bias`, and queries, keys and values (batch, heads, tokens, head size) of its norm."""
    outputs: Any = _AddNormQKV.apply(x_BTC, y_BTC, y_bias, *layer, num_heads, eps)  # type: ignore[no-untyped-call]
    return tuple(outputs)


def project_mlp(
    x_BTC: Tensor,
    attended_BTC: Tensor,
    project: tuple[Tensor, Tensor],
    up: NormLinear,
    down_weight: Tensor,
    *,
    scale: float,
    eps: float,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """`x + scale * project(attended)`, and the MLP of its norm without its last bias, which the next function adds.

    `project` is the weight and the bias of a linear layer.
    """
    outputs: Any = _ProjectMLP.apply(  # type: ignore[no-untyped-call]
        x_BTC, attended_BTC, *project, *up, down_weight, scale, eps, activation
    )
    return tuple(outputs)


def add_norm(x: Tensor, y: Tensor, y_bias: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The layer norm of `x + y + y_bias`."""
    normed: Tensor = _AddNorm.apply(x, y, y_bias, weight, bias, eps)  # type: ignore[no-untyped-call]
    return normed


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, y_bias: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        total, h, mean, rstd = block_kernels(x).add_norm(x, y, y_bias, weight, bias, eps)
        ctx.save_for_backward(total, weight, mean, rstd)
        return h  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dx_sum = block_kernels(dh).norm_backward(dh.contiguous(), *ctx.saved_tensors, None)
        return dx, dx, dx_sum, dweight, dh.flatten(0, -2).sum(0, dtype=dweight.dtype), None


class _AddNormQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, y_bias: Tensor | None, norm_weight: Tensor, norm_bias: Tensor,
        weight: Tensor, bias: Tensor, num_heads: int, eps: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        total, h, mean, rstd = block_kernels(x).add_norm(x, y, y_bias, norm_weight, norm_bias, eps)
        weight = weight.to(x.dtype)
        qkv = F.linear(h, weight, bias.to(x.dtype))
        ctx.save_for_backward(total, h, mean, rstd, norm_weight, weight)
        ctx.has_y = y is not None
        q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).transpose(1, 3).unbind(2)
        return total, q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        total, h, mean, rstd, norm_weight, weight = ctx.saved_tensors
        kernels = block_kernels(h)
        dqkv, dbias = kernels.merge_heads(dq, dk, dv)
        dweight = weight_gradient(dqkv, h)
        dh = (dqkv @ weight).view_as(h)
        dx, dnorm_weight, dx_sum = kernels.norm_backward(dh, total, norm_weight, mean, rstd, dtotal.contiguous())
        dy, dy_bias = (dx, dx_sum) if ctx.has_y else (None, None)
        return dx, dy, dy_bias, dnorm_weight, matvec(dbias, weight), dweight, dbias, None, None


class _ProjectMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, project_weight: Tensor, project_bias: Tensor, norm_weight: Tensor,
        norm_bias: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, scale: float, eps: float,
        activation: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype, kernels = x.dtype, block_kernels(x)
        project_weight, project_bias = (project_weight * scale).to(dtype), project_bias * scale
        up_weight, down_weight = up_weight.to(dtype), down_weight.to(dtype)
        y = attended @ project_weight.T
        total, h, mean, rstd = kernels.add_norm(x, y, project_bias, norm_weight, norm_bias, eps)
        a = F.linear(h, up_weight, up_bias.to(dtype))
        g = kernels.gelu(a, tanh=activation == "gelu_tanh")
        ctx.save_for_backward(attended, total, h, mean, rstd, a, g, norm_weight, project_weight, up_weight, down_weight)
        ctx.scale, ctx.tanh = scale, activation == "gelu_tanh"
        return total, g @ down_weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, dm: Tensor) -> tuple[Tensor | None, ...]:
        attended, total, h, mean, rstd, a, g, norm_weight, project_weight, up_weight, down_weight = ctx.saved_tensors
        kernels = block_kernels(h)
        ddown = weight_gradient(dm, g)
        da, dup_bias = kernels.gelu_backward(dm @ down_weight, a, tanh=ctx.tanh)
        dup = weight_gradient(da, h)
        dx, dnorm_weight, dx_sum = kernels.norm_backward(
            da @ up_weight, total, norm_weight, mean, rstd, dtotal.contiguous()
        )
        dproject = weight_gradient(dx, attended).mul_(ctx.scale)
        return (
            dx, dx @ project_weight, dproject, dx_sum * ctx.scale, dnorm_weight, matvec(dup_bias, up_weight), dup,
            dup_bias, ddown, None, None, None,
        )  # fmt: skip


def matvec(dy_sum: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the bias of a norm from that of the linear layer after it: the column sums of `dy @ weight`."""
    return dy_sum @ weight.to(dy_sum.dtype)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight of a linear layer, in fp32 for 16-bit activations."""
    dy, x = dy.flatten(0, -2), x.flatten(0, -2)
    if dy.dtype not in (torch.bfloat16, torch.float16):
        return dy.T @ x
    return torch.mm(dy.T, x, out_dtype=torch.float32) if dy.is_cuda else dy.T.float() @ x.float()


def block_kernels(x: Tensor) -> Any:
    """The Triton kernels on a GPU, otherwise the references below, with the same names and arguments."""
    if not x.is_cuda:
        return _Reference
    from whimbrel.ops import fused_block_triton

    return fused_block_triton


class _Reference:
    """What the kernels of `fused_block_triton` compute, in torch."""

    @staticmethod
    def add_norm(
        x: Tensor,
        y: Tensor | None,
        y_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
    ) -> tuple[Tensor, ...]:
        total = x if y is None or y_bias is None else (x + y + y_bias).to(x.dtype)
        wide = torch.promote_types(x.dtype, weight.dtype)
        normed, mean, rstd = torch.native_layer_norm(total.to(wide), (x.shape[-1],), weight, bias, eps)
        return total, normed.to(x.dtype), mean.flatten(), rstd.flatten()

    @staticmethod
    def norm_backward(
        dh: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = (*x.shape[:-1], 1)
        normed, g = (x - mean.view(shape)) * rstd.view(shape), dh * weight
        dx = g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)
        dx = dx * rstd.view(shape)
        dx = dx if residual is None else dx + residual
        return dx.to(x.dtype), (dh * normed).flatten(0, -2).sum(0), dx.flatten(0, -2).sum(0)

    @staticmethod
    def gelu(a: Tensor, *, tanh: bool) -> Tensor:
        return F.gelu(a, approximate="tanh" if tanh else "none")

    @staticmethod
    def gelu_backward(dg: Tensor, a: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]:
        da = torch.ops.aten.gelu_backward(dg, a, approximate="tanh" if tanh else "none")
        return da, da.flatten(0, -2).sum(0)

    @staticmethod
    def merge_heads(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        merged = torch.cat([x.transpose(1, 2).flatten(2) for x in (q_BHTD, k_BHTD, v_BHTD)], dim=-1).flatten(0, 1)
        return merged, merged.sum(0)
