"""Triton kernels for `fused_block`: each reads and writes a tensor once, and sums columns on the way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_norm", "add_norm_rows", "gelu", "gelu_backward", "gelu_parts", "merge_heads", "norm_backward"]

NORM_ROWS, NORM_BACKWARD_PROGRAMS = 2, 12
GELU_BLOCK, GELU_WARPS = 1024, 4
COLUMN_TILE = (16, 128)
COLUMN_WARPS, COLUMN_PROGRAMS = 4, 8
"""Tile shapes, warps per program, and programs per multiprocessor."""


@triton.jit  # type: ignore[untyped-decorator]
def add_norm_rows(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, y_bias_ptr, weight_ptr, bias_ptr, sum_ptr, mean_ptr, rstd_ptr, rows, eps,
    width: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_Y: tl.constexpr,
):  # fmt: skip
    """The norm of the rows of a program in fp32, their offsets and mask; stores sum, mean and rstd."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < width
    mask = (row < rows)[:, None] & inside[None, :]
    offsets = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_Y:
        x += tl.load(y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x += tl.load(y_bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offsets, rounded, mask=mask)
        x = rounded.to(tl.float32)
    mean = tl.sum(x, axis=1) / width
    centered = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / width + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
    h = centered * rstd[:, None] * weight[None, :] + bias[None, :]
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    return h, offsets, mask


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, y_bias_ptr, weight_ptr, bias_ptr, sum_ptr, h_ptr, mean_ptr, rstd_ptr, rows, eps,
    width: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_Y: tl.constexpr,
):  # fmt: skip
    h, offsets, mask = add_norm_rows(
        x_ptr, y_ptr, y_bias_ptr, weight_ptr, bias_ptr, sum_ptr, mean_ptr, rstd_ptr, rows, eps, width, BLOCK, ROWS,
        HAS_Y,
    )  # fmt: skip
    tl.store(h_ptr + offsets, h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    dh_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, residual_ptr, dx_ptr, partial_ptr, rows, rows_per_program,
    width: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    sum_weight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    sum_dx = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, rows_per_program, ROWS):
        row = program * rows_per_program + start + tl.arange(0, ROWS)
        valid = row < rows
        mask = valid[:, None] & inside[None, :]
        offsets = row[:, None] * width + column[None, :]
        dh = tl.load(dh_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
        mean = tl.load(mean_ptr + row, mask=valid, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
        normed = (x - mean[:, None]) * rstd[:, None]
        sum_weight += dh * normed
        g = dh * weight[None, :]
        along = tl.sum(g * normed, axis=1) / width
        constant = tl.sum(g, axis=1) / width
        dx = (g - constant[:, None] - normed * along[:, None]) * rstd[:, None]
        if HAS_RESIDUAL:
            dx += residual.to(tl.float32)
        sum_dx += dx
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    base = partial_ptr + program * 2 * width + column
    tl.store(base, tl.sum(sum_weight, axis=0), mask=inside)
    tl.store(base + width, tl.sum(sum_dx, axis=0), mask=inside)


@triton.jit
def reciprocal(x):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def gelu_parts(x, TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    """GELU is x * gate; returns the gate and its derivative.

    The normal distribution function is that of Abramowitz and Stegun 7.1.26, off by at most 1.5e-7, whose exponential
    is also that of the density: libdevice's erf takes longer than reading and writing the tensors.
    """
    if TANH:
        u = 0.7978845608028654 * x * (1.0 + 0.044715 * x * x)
        gate = reciprocal(1.0 + tl.exp2(-2.8853900817779268 * u))
        slope = gate * (1.0 - gate) * 2.0 * (0.7978845608028654 + 0.10703222440890037 * x * x)
    else:
        t = reciprocal(1.0 + 0.2316418882663604 * tl.abs(x))
        density = tl.exp2(-0.7213475204444817 * x * x)
        poly = 0.5307027145 * t - 0.7265760135
        poly = poly * t + 0.7107068705
        poly = poly * t - 0.142248368
        poly = (poly * t + 0.127414796) * t
        tail = poly * density
        gate = tl.where(x >= 0, 1.0 - tail, tail)
        slope = 0.3989422804014327 * density
    return gate, slope


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_kernel(a_ptr, g_ptr, count, TANH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    a = tl.load(a_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gate, _slope = gelu_parts(a, TANH)
    tl.store(g_ptr + offsets, (a * gate).to(g_ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_backward_kernel(  # type: ignore[no-untyped-def]
    dg_ptr, a_ptr, da_ptr, partial_ptr, rows, rows_per_program, width,
    TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(1).to(tl.int64)
    inside = column < width
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, rows_per_program, ROWS):
        row = program * rows_per_program + start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        offsets = row[:, None] * width + column[None, :]
        a = tl.load(a_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dg = tl.load(dg_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        gate, slope = gelu_parts(a, TANH)
        da = dg * (gate + a * slope)
        total += da
        tl.store(da_ptr + offsets, da.to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + program * width + column, tl.sum(total, axis=0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_heads_kernel(  # type: ignore[no-untyped-def]
    source_ptr, out_ptr, partial_ptr, rows, rows_per_program, tokens, stride_b, stride_h, stride_t, width,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(1).to(tl.int64)
    source_column = (column // D) * stride_h + column % D
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, rows_per_program, ROWS):
        row = program * rows_per_program + start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None]
        source_row = (row // tokens) * stride_b + (row % tokens) * stride_t
        value = tl.load(source_ptr + source_row[:, None] + source_column[None, :], mask=mask, other=0.0)
        total += value.to(tl.float32)
        tl.store(out_ptr + row[:, None] * width + column[None, :], value, mask=mask)
    tl.store(partial_ptr + program * width + column, tl.sum(total, axis=0))


def add_norm(
    x: Tensor,
    y: Tensor | None,
    y_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:
    """`x + y + y_bias`, its layer norm, and mean and 1 / standard deviation of each row."""
    width = x.shape[-1]
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    total = x if y is None else torch.empty_like(x)
    h = torch.empty_like(x)
    mean, rstd = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    kernel: Any = _add_norm_kernel
    kernel[(triton.cdiv(rows, NORM_ROWS),)](
        x, x if y is None else y, weight if y_bias is None else y_bias, weight, bias,
        total, h, mean, rstd, rows, eps,
        width=width, BLOCK=block, ROWS=NORM_ROWS, HAS_Y=y is not None,
        num_warps=min(16, max(4, block // 256)),
    )  # fmt: skip
    return total, h, mean, rstd


def norm_backward(
    dh: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the input plus `residual`, the gradient of the weight, and the column sums of the first."""
    width = x.shape[-1]
    rows = x.numel() // width
    dx = torch.empty_like(x)
    programs = _programs(x, NORM_BACKWARD_PROGRAMS)
    block, per_program = triton.next_power_of_2(width), triton.cdiv(rows, programs)
    partial = torch.empty(programs, 2, width, dtype=torch.float32, device=x.device)
    kernel: Any = _norm_backward_kernel
    kernel[(programs,)](
        dh, x, weight, mean, rstd, dh if residual is None else residual, dx, partial, rows, per_program, width=width,
        BLOCK=block, ROWS=1, HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, block // 1024)),
    )  # fmt: skip
    dweight, sums = partial.sum(0)
    return dx, dweight, sums


def gelu(a: Tensor, *, tanh: bool) -> Tensor:
    """GELU, exact or its tanh approximation."""
    g = torch.empty_like(a)
    kernel: Any = _gelu_kernel
    kernel[(triton.cdiv(a.numel(), GELU_BLOCK),)](a, g, a.numel(), TANH=tanh, BLOCK=GELU_BLOCK, num_warps=GELU_WARPS)
    return g


def gelu_backward(dg: Tensor, a: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]:
    """The gradient of the input of GELU, written over `dg`, and its column sums."""
    width = a.shape[-1]
    rows = a.numel() // width
    (tile_rows, tile_columns), column_programs = COLUMN_TILE, triton.cdiv(width, COLUMN_TILE[1])
    programs = max(1, _programs(a, COLUMN_PROGRAMS) // column_programs)
    per_program = triton.cdiv(triton.cdiv(rows, programs), tile_rows) * tile_rows
    partial = torch.empty(programs, width, dtype=torch.float32, device=a.device)
    kernel: Any = _gelu_backward_kernel
    kernel[(column_programs, programs)](
        dg, a, dg, partial, rows, per_program, width, TANH=tanh, ROWS=tile_rows, COLUMNS=tile_columns,
        num_warps=COLUMN_WARPS,
    )  # fmt: skip
    return dg, partial.sum(0)


def merge_heads(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
    """Queries, keys and values of all heads in one tensor (batch * tokens, width), and its column sums."""
    B, _, T, D = q_BHTD.shape
    rows, widths = B * T, [x.shape[1] * D for x in (q_BHTD, k_BHTD, v_BHTD)]
    tile_rows, tile_columns = COLUMN_TILE
    while any(width % tile_columns for width in widths):
        tile_columns //= 2
    programs = max(1, _programs(q_BHTD, COLUMN_PROGRAMS) * tile_columns // max(widths))
    per_program = triton.cdiv(triton.cdiv(rows, programs), tile_rows) * tile_rows
    out = torch.empty(rows, sum(widths), dtype=q_BHTD.dtype, device=q_BHTD.device)
    partial = torch.empty(programs, sum(widths), dtype=torch.float32, device=out.device)
    kernel: Any = _merge_heads_kernel
    first = 0
    for x, width in zip((q_BHTD, k_BHTD, v_BHTD), widths, strict=True):
        x = x if x.stride(-1) == 1 else x.contiguous()  # the math kernel of attention transposes the gradient of k
        kernel[(width // tile_columns, programs)](
            x, out[:, first:], partial[:, first:], rows, per_program, T, *x.stride()[:3], sum(widths), D=D,
            ROWS=tile_rows, COLUMNS=tile_columns, num_warps=COLUMN_WARPS,
        )  # fmt: skip
        first += width
    return out, partial.sum(0)


def _programs(x: Tensor, per_multiprocessor: int) -> int:
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count) * per_multiprocessor
