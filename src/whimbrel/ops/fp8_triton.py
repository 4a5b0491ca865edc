"""Triton kernels for `fp8`: each reads a tensor once and writes it in fp8, most of them also transposed.

Tensors in fp8 are written as bytes. A tile is transposed in shared memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whimbrel.ops.fused_block_triton import NORM_ROWS, add_norm_rows, gelu_parts

__all__ = ["add_norm", "cast", "gelu", "gelu_backward", "logits_gradient", "row_losses", "transpose"]

TILE, SMALL_TILE, TILE_WARPS = (64, 128), (64, 64), 8
"""Rows and columns, and warps. At least 32 rows, since a row of a transposed tile should fill a sector of 32 bytes; the
small tile is for kernels that need more registers per value."""
GELU_BACKWARD_PROGRAMS = 8
"""Per multiprocessor; each writes a row of column sums."""
LOSS_BLOCK, LOSS_WARPS = 2048, 4
"""Columns per iteration of the loss of a row."""


@triton.jit  # type: ignore[untyped-decorator]
def _encode(x, scale, IS_E5M2: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bytes of fp32 values in fp8: saturated, rounded to nearest; NaN stays NaN.

    Four values become one 32-bit word. `x.to(tl.float8e4nv)` casts pairs, which ptxas 12.8 (shipped with triton 3.6)
    miscompiles in `_store_tile`: when it combines two pairs for a store, it reads an uninitialized register as the
    second byte of the first pair.
    """
    FORMAT: tl.constexpr = "e5m2x2" if IS_E5M2 else "e4m3x2"
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite." + FORMAT + ".f32 low, $2, $1;"
        "  cvt.rn.satfinite." + FORMAT + ".f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [x * scale], dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _record(lanes_ptr, magnitude, lane):  # type: ignore[no-untyped-def]
    """Record the largest of a tile of magnitudes. The bits of floats that are not negative are ordered as integers."""
    peak = tl.max(tl.max(magnitude, axis=1), axis=0)
    tl.atomic_max(lanes_ptr + lane, peak.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _store_tile(codes_ptr, transposed_ptr, codes, row, column, rows, width, transposed_stride):  # type: ignore[no-untyped-def]
    """Store a tile of bytes at (row, column), and transposed."""
    inside = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(codes_ptr + row[:, None] * width + column[None, :], codes, mask=inside)
    inside = (column < width)[:, None] & (row < rows)[None, :]
    column = column.to(tl.int64)
    tl.store(transposed_ptr + column[:, None] * transposed_stride + row[None, :], tl.trans(codes), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _cast_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, transposed_ptr, scale_ptr, lanes_ptr, rows, width,
    IS_E5M2: tl.constexpr, RECORDS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    codes = _encode(x, tl.load(scale_ptr), IS_E5M2)
    _store_tile(codes_ptr, transposed_ptr, codes, row, column, rows, width, rows)
    if RECORDS:
        _record(lanes_ptr, tl.abs(x), (tl.program_id(0) + tl.program_id(1)) % LANES)


@triton.jit  # type: ignore[untyped-decorator]
def _transpose_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, transposed_ptr, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    codes = tl.load(codes_ptr + row[:, None] * width + column[None, :], mask=inside, other=0)
    inside = (column < width)[:, None] & (row < rows)[None, :]
    column = column.to(tl.int64)
    tl.store(transposed_ptr + column[:, None] * rows + row[None, :], tl.trans(codes), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, y_bias_ptr, weight_ptr, bias_ptr, sum_ptr, codes_ptr, mean_ptr, rstd_ptr, scale_ptr, lanes_ptr,
    rows, eps, width: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    h, offsets, mask = add_norm_rows(
        x_ptr, y_ptr, y_bias_ptr, weight_ptr, bias_ptr, sum_ptr, mean_ptr, rstd_ptr, rows, eps, width, BLOCK, ROWS,
        HAS_Y=True,
    )  # fmt: skip
    h = tl.where(mask, h, 0.0)
    tl.store(codes_ptr + offsets, _encode(h, tl.load(scale_ptr), IS_E5M2=False), mask=mask)
    _record(lanes_ptr, tl.abs(h), tl.program_id(0) % LANES)


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_kernel(  # type: ignore[no-untyped-def]
    a_ptr, codes_ptr, transposed_ptr, scale_ptr, lanes_ptr, rows, width,
    TANH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    a = tl.load(a_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    gate, _slope = gelu_parts(a, TANH)
    g = a * gate
    _store_tile(
        codes_ptr, transposed_ptr, _encode(g, tl.load(scale_ptr), IS_E5M2=False), row, column, rows, width, rows
    )
    _record(lanes_ptr, tl.abs(g), (tl.program_id(0) + tl.program_id(1)) % LANES)


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_backward_kernel(  # type: ignore[no-untyped-def]
    dg_ptr, a_ptr, codes_ptr, transposed_ptr, partial_ptr, scale_ptr, lanes_ptr, rows, rows_per_program, width,
    TANH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(1).to(tl.int64)
    scale = tl.load(scale_ptr)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    peak = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, rows_per_program, ROWS):
        row = program * rows_per_program + start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        offsets = row[:, None] * width + column[None, :]
        a = tl.load(a_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        dg = tl.load(dg_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        gate, slope = gelu_parts(a, TANH)
        da = dg * (gate + a * slope)
        total += da
        peak = tl.maximum(peak, tl.abs(da))
        _store_tile(codes_ptr, transposed_ptr, _encode(da, scale, IS_E5M2=True), row, column, rows, width, rows)
    tl.store(partial_ptr + program * width + column, tl.sum(total, axis=0), mask=column < width)
    _record(lanes_ptr, peak, (tl.program_id(0) + tl.program_id(1)) % LANES)


@triton.jit  # type: ignore[untyped-decorator]
def _capped(z, softcap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Capped logits, and the derivative."""
    slope = tl.full(z.shape, 1.0, dtype=tl.float32)
    if HAS_CAP:
        t = 2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0
        z = softcap * t
        slope = 1.0 - t * t
    return z, slope


@triton.jit  # type: ignore[untyped-decorator]
def _row_losses_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, losses_ptr, lse_ptr, softcap, ignore_index,
    vocab_size: tl.constexpr, width: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * width
    target = tl.load(targets_ptr + row)
    row_max = -1e30
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):  # online softmax, as in `cross_entropy_triton`
        offsets = start + tl.arange(0, BLOCK)
        z = tl.load(base + offsets, mask=offsets < width, other=0.0).to(tl.float32)
        z, _slope = _capped(z, softcap, HAS_CAP)
        z = tl.where(offsets < vocab_size, z, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(z, axis=0))
        total = total * tl.exp(row_max - new_max) + tl.exp(z - new_max)
        row_max = new_max
    lse = row_max + tl.log(tl.sum(total, axis=0))
    is_valid = target != ignore_index
    target_offsets = tl.where(is_valid, target, 0) + tl.arange(0, 1)
    target_z, _slope = _capped(tl.load(base + target_offsets).to(tl.float32), softcap, HAS_CAP)
    loss = tl.where(is_valid, lse - tl.sum(target_z, axis=0), 0.0)
    tl.store(losses_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


@triton.jit  # type: ignore[untyped-decorator]
def _logits_gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, lse_ptr, codes_ptr, transposed_ptr, rows, transposed_stride, scale, softcap, ignore_index,
    vocab_size: tl.constexpr, width: tl.constexpr, HAS_CAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    target = tl.load(targets_ptr + row, mask=row < rows, other=ignore_index).to(tl.int32)
    lse = tl.load(lse_ptr + row, mask=row < rows, other=0.0)
    z = tl.load(logits_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    z, slope = _capped(z, softcap, HAS_CAP)
    gradient = (tl.exp(z - lse[:, None]) - tl.where(column[None, :] == target[:, None], 1.0, 0.0)) * slope
    is_counted = (target != ignore_index)[:, None] & (column < vocab_size)[None, :]
    codes = _encode(tl.where(is_counted, gradient, 0.0), scale, IS_E5M2=True)
    _store_tile(codes_ptr, transposed_ptr, codes, row, column, rows, width, transposed_stride)


def cast(x: Tensor, dtype: torch.dtype, scale: Tensor, lanes: Tensor | None) -> tuple[Tensor, Tensor]:
    """A matrix in fp8, as is and transposed."""
    rows, width = x.shape
    codes, transposed = _empty_pair(x, dtype)
    kernel: Any = _cast_kernel
    kernel[_tiles(rows, width)](
        x, _bytes(codes), _bytes(transposed), scale, scale if lanes is None else lanes.view(torch.int32), rows, width,
        IS_E5M2=dtype == torch.float8_e5m2, RECORDS=lanes is not None, LANES=1 if lanes is None else len(lanes),
        ROWS=TILE[0], COLUMNS=TILE[1], num_warps=TILE_WARPS,
    )  # fmt: skip
    return codes, transposed


def transpose(codes: Tensor) -> Tensor:
    """The transpose of a matrix in fp8, as a copy."""
    rows, width = codes.shape
    transposed = torch.empty(width, rows, dtype=codes.dtype, device=codes.device)
    kernel: Any = _transpose_kernel
    kernel[_tiles(rows, width)](
        _bytes(codes), _bytes(transposed), rows, width, ROWS=TILE[0], COLUMNS=TILE[1], num_warps=TILE_WARPS
    )
    return transposed


def add_norm(
    x: Tensor, y: Tensor, y_bias: Tensor, weight: Tensor, bias: Tensor, eps: float, scale: Tensor, lanes: Tensor
) -> tuple[Tensor, ...]:
    """The norm (rows, width) in fp8; `x + y + y_bias`, and mean and 1 / standard deviation of each row."""
    width = x.shape[-1]
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    total, codes = torch.empty_like(x), torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    mean, rstd = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    kernel: Any = _add_norm_kernel
    kernel[(triton.cdiv(rows, NORM_ROWS),)](
        x, y, y_bias, weight, bias, total, _bytes(codes), mean, rstd, scale, lanes.view(torch.int32), rows, eps,
        width=width, BLOCK=block, ROWS=NORM_ROWS, LANES=len(lanes), num_warps=min(16, max(4, block // 256)),
    )  # fmt: skip
    return codes, total, mean, rstd


def gelu(a: Tensor, *, tanh: bool, scale: Tensor, lanes: Tensor) -> tuple[Tensor, Tensor]:
    """GELU of a matrix in fp8, as is and transposed."""
    rows, width = a.shape
    codes, transposed = _empty_pair(a, torch.float8_e4m3fn)
    kernel: Any = _gelu_kernel
    kernel[_tiles(rows, width)](
        a, _bytes(codes), _bytes(transposed), scale, lanes.view(torch.int32), rows, width,
        TANH=tanh, LANES=len(lanes), ROWS=TILE[0], COLUMNS=TILE[1], num_warps=TILE_WARPS,
    )  # fmt: skip
    return codes, transposed


def gelu_backward(dg: Tensor, a: Tensor, *, tanh: bool, scale: Tensor, lanes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the input of GELU in fp8, as is and transposed, and its column sums."""
    rows, width = a.shape
    codes, transposed = _empty_pair(a, torch.float8_e5m2)
    column_programs, row_tiles = _tiles(rows, width, SMALL_TILE)
    programs = min(row_tiles, max(1, _multiprocessors(a) * GELU_BACKWARD_PROGRAMS // column_programs))
    per_program = triton.cdiv(row_tiles, programs) * SMALL_TILE[0]
    partial = torch.empty(programs, width, dtype=torch.float32, device=a.device)
    kernel: Any = _gelu_backward_kernel
    kernel[(column_programs, programs)](
        dg, a, _bytes(codes), _bytes(transposed), partial, scale, lanes.view(torch.int32), rows, per_program, width,
        TANH=tanh, LANES=len(lanes), ROWS=SMALL_TILE[0], COLUMNS=SMALL_TILE[1], num_warps=TILE_WARPS,
    )  # fmt: skip
    return codes, transposed, partial.sum(0)


def row_losses(
    logits: Tensor, targets: Tensor, vocab_size: int, softcap: float | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The loss of each row, 0 if its target is ignored, and the logarithm of the sum of exponentials."""
    rows, width = logits.shape
    losses, lse = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    kernel: Any = _row_losses_kernel
    kernel[(rows,)](
        logits, targets, losses, lse, softcap or 1.0, ignore_index, vocab_size=vocab_size, width=width,
        HAS_CAP=softcap is not None, BLOCK=LOSS_BLOCK, num_warps=LOSS_WARPS,
    )  # fmt: skip
    return losses, lse


def logits_gradient(
    logits: Tensor, targets: Tensor, lse: Tensor, vocab_size: int, softcap: float | None, ignore_index: int,
    scale: float, transposed: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of the summed loss in e5m2; its transpose is written to `transposed` (vocabulary, rows)."""
    rows, width = logits.shape
    codes = torch.empty(rows, width, dtype=torch.float8_e5m2, device=logits.device)
    kernel: Any = _logits_gradient_kernel
    kernel[_tiles(rows, width, SMALL_TILE)](
        logits, targets, lse, _bytes(codes), _bytes(transposed), rows, transposed.stride(0), scale, softcap or 1.0,
        ignore_index, vocab_size=vocab_size, width=width, HAS_CAP=softcap is not None, ROWS=SMALL_TILE[0],
        COLUMNS=SMALL_TILE[1], num_warps=TILE_WARPS,
    )  # fmt: skip
    return codes


def _tiles(rows: int, width: int, tile: tuple[int, int] = TILE) -> tuple[int, int]:
    return triton.cdiv(width, tile[1]), triton.cdiv(rows, tile[0])


def _empty_pair(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix of the shape of `x` and one of the transposed shape, uninitialized."""
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=dtype, device=x.device)
    return codes, torch.empty(width, rows, dtype=dtype, device=x.device)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _multiprocessors(x: Tensor) -> int:
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count) if x.is_cuda else 1
