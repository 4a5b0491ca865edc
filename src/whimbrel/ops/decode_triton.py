"""Triton kernels for decoding one sequence, a token at a time.

A step reads every weight once, so it cannot be faster than the memory; each kernel adds its latency. So there are few
kernels:

    linear       norm -> matrix-vector products -> bias, activation, residual
    attention    norm and rotation of queries and keys -> write to the KV cache -> attention over it
    next_token   argmax of the logits, and the inputs of the next step

Quantized weights are converted in registers. With programmatic dependent launch (PDL) a kernel starts, and loads its
first weights, while the one before it still runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["LinearWeight", "Norm", "Scratch", "Tile", "attention", "linear", "next_token"]

LOG2_E = tl.constexpr(1.4426950408889634)
SPLITS, MIN_TOKENS, TILE = 16, 256, 32
"""Attention: the maximum number of programs per KV head, the tokens up to which one is enough, tokens per tile."""
VOCAB_PARTS, VOCAB_BLOCK = 64, 1024
"""Programs that search the logits of a sequence, and the logits that each of them loads at a time."""


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The weight of a linear layer: a dense matrix, or codes with their scales."""

    values: Tensor
    scales: Tensor | None = None
    format: str = "dense"
    """dense, int8, int4 or fp8."""
    group_size: int = 0
    """Columns that share a scale; 0: the complete row."""
    quantizes_input: bool = False
    """Whether the input is quantized to fp8."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a weight is divided: rows of a program, elements of each row that it loads at a time, its warps."""

    rows: int
    block: int
    warps: int


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of the input of a linear layer."""

    kind: str
    """layer or rms."""
    eps: float
    weight: Tensor | None
    bias: Tensor | None


class Scratch:
    """Intermediate results of `attention` and `next_token`, allocated once per model."""

    def __init__(self, heads: int, head_size: int, device: torch.device) -> None:
        self.outputs = torch.empty(heads * SPLITS * head_size, device=device)
        self.maxes, self.sums = (torch.empty(heads * SPLITS, device=device) for _ in range(2))
        self.max_logits = torch.empty(VOCAB_PARTS, device=device)
        self.max_tokens = torch.empty(VOCAB_PARTS, dtype=torch.int32, device=device)


def linear(
    x: Tensor,
    weight: LinearWeight,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    activation: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    residual_scale: float = 1.0,
    softcap: float | None = None,
    tile: Tile | None = None,
) -> None:
    """Write `residual + residual_scale * activation(norm(x) @ weight.T + bias)` to y, for vectors x and y.

    `gated`: the weight has twice as many rows as y, gates first; `activation` applies to the gates, which multiply the
    others.
    """
    rows, columns, values = len(y), len(x), weight.values
    tile = tile or _choose_tile(values, gated)
    _linear_kernel[(triton.cdiv(rows, tile.rows),)](
        x, values, weight.scales, bias, norm and norm.weight, norm and norm.bias, residual, y,
        rows, norm.eps if norm else 0.0, residual_scale, softcap,
        K=columns, FORMAT=weight.format, GROUP=weight.group_size, NORM=norm.kind if norm else "none",
        ACTIVATION=activation, GATED=gated, QUANTIZES_INPUT=weight.quantizes_input, ROWS=tile.rows, BLOCK=tile.block,
        PADDED_K=triton.next_power_of_2(columns), INTERPRETED=not x.is_cuda, **_options(x, tile.warps),
    )  # fmt: skip


def _choose_tile(values: Tensor, gated: bool) -> Tile:
    """16 bytes per thread and row, and enough programs to fill a GPU."""
    warps = 4
    block = min(warps * 32 * 16 // values.element_size(), max(64, triton.next_power_of_2(values.size(1))))
    return Tile(2 if gated else 4, block, warps)


def attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    starts: Tensor,
    counts: Tensor,
    y: Tensor,
    scratch: Scratch,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    norms_heads: bool = False,
    eps: float = 0.0,
    frequencies: Tensor | None = None,
    window: int | None = None,
) -> None:
    """Store the key and value of a token in the paged cache, and write its attention over the cache to y.

    `qkv` has queries, keys and values, before norms and rotation; keys and values are (blocks, block size, KV heads,
    head size). `starts` is the number of tokens in the cache; with `counts` 0 nothing is stored.
    """
    block_size, kv_heads, head_size = keys.shape[1:]
    heads = len(y) // head_size
    parts = scratch.outputs, scratch.maxes, scratch.sums
    shared = {"HEADS": heads, "HEAD_SIZE": head_size, "WINDOW": window or 0, "SPLITS": SPLITS, "MIN_TOKENS": MIN_TOKENS}
    _attention_kernel[(1, kv_heads, SPLITS)](
        qkv, query_norm, key_norm, frequencies, keys, values, tables, starts, counts, *parts, y, tables.stride(0), eps,
        KV_HEADS=kv_heads, GROUP_ROWS=max(16, triton.next_power_of_2(heads // kv_heads)), NORMS_HEADS=norms_heads,
        BLOCK_SIZE=block_size, TILE=TILE, **shared, **_options(y, 4),
    )  # fmt: skip
    if tables.size(1) * block_size > MIN_TOKENS:
        _combine_kernel[(1, heads)](*parts, starts, y, **shared, **_options(y, 1))


def next_token(
    logits: Tensor, tokens: Tensor, starts: Tensor, counts: Tensor, argmax: Tensor, scratch: Scratch
) -> None:
    """Write the argmax of the logits to `tokens` and `argmax` (-1 if they are not finite), and advance `starts`."""
    parts = scratch.max_logits, scratch.max_tokens
    _max_logits_kernel[(1, VOCAB_PARTS)](
        logits, *parts, len(logits), len(logits), PARTS=VOCAB_PARTS, BLOCK=VOCAB_BLOCK, **_options(logits, 4)
    )
    _next_token_kernel[(1,)](*parts, tokens, starts, counts, argmax, PARTS=VOCAB_PARTS, **_options(logits, 1))


def _options(tensor: Tensor, warps: int) -> dict[str, Any]:
    """Launch options: programmatic dependent launch needs a Hopper GPU."""
    pdl = tensor.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    options: dict[str, Any] = {"PDL": pdl, "num_warps": warps}
    return options | {"launch_pdl": True} if pdl else options


# Linear layers


@triton.jit  # type: ignore[untyped-decorator]
def _linear_kernel(  # type: ignore[no-untyped-def]
    x, weight, scales, bias, norm_weight, norm_bias, residual, y, rows, eps, residual_scale, softcap,
    K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, QUANTIZES_INPUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PADDED_K: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`y = residual + residual_scale * activation(weight @ norm(x) + bias)`; a program computes ROWS elements of y.

    x has K elements, and y `rows`. With GATED, the weight has 2 * rows rows, gates first. BLOCK is the number of
    elements of `weight` (for int4, bytes of two codes) that are loaded per row at a time.
    """
    PARTS: tl.constexpr = 2 if FORMAT == "int4" else 1
    WIDTH: tl.constexpr = K // PARTS
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(index, rows - 1)
    pointers = weight + row[:, None].to(tl.int64) * WIDTH + tl.arange(0, BLOCK)[None, :]
    codes = _load_codes(pointers, 0, WIDTH, BLOCK)
    up_pointers, up_codes = pointers, codes
    if GATED:
        up_pointers = pointers + rows.to(tl.int64) * WIDTH
        up_codes = _load_codes(up_pointers, 0, WIDTH, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()  # x is the result of the kernel before
    mean, rstd, input_scale = _statistics(x, norm_weight, norm_bias, eps, K, PADDED_K, NORM, QUANTIZES_INPUT)
    SUMS: tl.constexpr = BLOCK if GROUP == 0 else BLOCK // (GROUP // PARTS)
    acc = tl.zeros([ROWS, SUMS], tl.float32)
    up_acc = acc
    for start in tl.static_range(0, WIDTH, BLOCK):  # unrolled: 16-bit values would be packed again in every iteration
        block, up_block = codes, up_codes
        if start + BLOCK < WIDTH:  # the loads of the next block start before the products of this one
            codes = _load_codes(pointers, start + BLOCK, WIDTH, BLOCK)
            if GATED:
                up_codes = _load_codes(up_pointers, start + BLOCK, WIDTH, BLOCK)
        even, odd = _load_input(
            x, norm_weight, norm_bias, mean, rstd, input_scale, start, K, PARTS, BLOCK, NORM, QUANTIZES_INPUT,
            INTERPRETED,
        )  # fmt: skip
        acc = _add_products(acc, block, scales, even, odd, row, start, K, FORMAT, GROUP, ROWS, BLOCK, INTERPRETED)
        if GATED:
            up_acc = _add_products(
                up_acc, up_block, scales, even, odd, row + rows, start, K, FORMAT, GROUP, ROWS, BLOCK, INTERPRETED
            )
    out = _activate(_finish(acc, scales, bias, input_scale, row, GROUP, QUANTIZES_INPUT), ACTIVATION)
    if GATED:
        out *= _finish(up_acc, scales, bias, input_scale, row + rows, GROUP, QUANTIZES_INPUT)
    if residual is not None:
        out = tl.load(residual + row).to(tl.float32) + residual_scale * out
    if softcap is not None:
        out = softcap * _tanh(out / softcap)
    tl.store(y + index, out.to(y.dtype.element_ty), mask=index < rows)


@triton.jit  # type: ignore[untyped-decorator]
def _load_codes(pointers, start, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of weights, which no other program reads."""
    if WIDTH % BLOCK == 0:
        return tl.load(pointers + start, eviction_policy="evict_first")
    else:
        mask = (start + tl.arange(0, BLOCK) < WIDTH)[None, :]
        return tl.load(pointers + start, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    x, norm_weight, norm_bias, eps,
    K: tl.constexpr, PADDED_K: tl.constexpr, NORM: tl.constexpr, QUANTIZES_INPUT: tl.constexpr,
):  # fmt: skip
    """Mean and reciprocal standard deviation of the input, and its scale if it is quantized."""
    mean, rstd, scale = 0.0, 1.0, 1.0
    if NORM != "none" or QUANTIZES_INPUT:
        column = tl.arange(0, PADDED_K)
        mask = column < K
        values = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
        if NORM == "layer":
            mean = tl.sum(values, 0) / K
            centered = tl.where(mask, values - mean, 0.0)
            rstd = tl.rsqrt(tl.sum(centered * centered, 0) / K + eps)
        if NORM == "rms":
            rstd = tl.rsqrt(tl.sum(values * values, 0) / K + eps)
        if QUANTIZES_INPUT:
            values = _normalize(values, norm_weight, norm_bias, mean, rstd, column, mask, NORM, x.dtype.element_ty)
            scale = tl.maximum(tl.max(tl.abs(tl.where(mask, values, 0.0)), 0) / 448.0, 1.1754943508222875e-38)
    return mean, rstd, scale


@triton.jit  # type: ignore[untyped-decorator]
def _normalize(  # type: ignore[no-untyped-def]
    values, norm_weight, norm_bias, mean, rstd, column, mask, NORM: tl.constexpr, DTYPE: tl.constexpr
):
    """The norm of some columns of the input, rounded to its dtype as the norm of the model does."""
    if NORM != "none":
        values = values * rstd if NORM == "rms" else (values - mean) * rstd
        if norm_weight is not None:
            values *= tl.load(norm_weight + column, mask=mask, other=0.0).to(tl.float32)
        if norm_bias is not None:
            values += tl.load(norm_bias + column, mask=mask, other=0.0).to(tl.float32)
        values = values.to(DTYPE).to(tl.float32)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _load_input(  # type: ignore[no-untyped-def]
    x, norm_weight, norm_bias, mean, rstd, scale, start,
    K: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, QUANTIZES_INPUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The normalized inputs of a block: of even and of odd columns, or twice the same with one part."""
    if PARTS == 2:
        column = start * 2 + tl.arange(0, BLOCK)[:, None] * 2 + tl.arange(0, 2)[None, :]
    else:
        column = start + tl.arange(0, BLOCK)
    mask = column < K
    values = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
    values = _normalize(values, norm_weight, norm_bias, mean, rstd, column, mask, NORM, x.dtype.element_ty)
    if QUANTIZES_INPUT:
        values = _round_to_fp8(tl.minimum(tl.maximum(values * (1.0 / scale), -448.0), 448.0), INTERPRETED)
    if PARTS == 2:
        even, odd = tl.split(values)
        return even, odd
    else:
        return values, values


@triton.jit  # type: ignore[untyped-decorator]
def _round_to_fp8(values, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest values of float8_e4m3fn. Triton's interpreter rounds 31.5 to 16 instead of 32."""
    if INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
        subnormal = (values * 512.0 + 12582912.0 - 12582912.0) / 512.0
        return tl.where(tl.abs(values) < 0.015625, subnormal, normal)
    else:
        return values.to(tl.float8e4nv).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _add_products(  # type: ignore[no-untyped-def]
    acc, codes, scales, even, odd, row, start,
    K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the products of a block to `acc`: per column, or with groups of columns per group, scaled."""
    if FORMAT != "int4":
        return codes.to(tl.float32) * even[None, :] + acc
    else:
        low, high = _decode_int4(codes, INTERPRETED)
        products = low * even[None, :] - 24.0 * (even + odd)[None, :]
        products = high * odd[None, :] + products
        GROUPS: tl.constexpr = BLOCK // (GROUP // 2)
        sums = tl.sum(tl.reshape(products, [ROWS, GROUPS, GROUP // 2]), 2)
        group = start // (GROUP // 2) + tl.arange(0, GROUPS)
        pointers = scales + row[:, None] * (K // GROUP) + group[None, :]
        if K % (BLOCK * 2) == 0:
            scale = tl.load(pointers)
        else:
            scale = tl.load(pointers, mask=(group < K // GROUP)[None, :], other=0.0)
        return sums * scale.to(tl.float32) + acc


@triton.jit  # type: ignore[untyped-decorator]
def _decode_int4(codes, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes in the low and in the high half of each byte, plus 24, as fp32.

    Four bits are moved to the top of the mantissa of a number from 16 to 32: an integer conversion per code would take
    longer than loading the codes. Four bytes share a register.
    """
    if INTERPRETED:
        return (codes & 15).to(tl.float32) + 16.0, (codes >> 4).to(tl.float32) + 16.0
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            shl.b32 t, $8, 19; lop3.b32 $0, t, 0x780000, 0x41800000, 0xEA;
            shl.b32 t, $8, 15; lop3.b32 $4, t, 0x780000, 0x41800000, 0xEA;
            shl.b32 t, $8, 11; lop3.b32 $1, t, 0x780000, 0x41800000, 0xEA;
            shl.b32 t, $8, 7;  lop3.b32 $5, t, 0x780000, 0x41800000, 0xEA;
            shl.b32 t, $8, 3;  lop3.b32 $2, t, 0x780000, 0x41800000, 0xEA;
            shr.b32 t, $8, 1;  lop3.b32 $6, t, 0x780000, 0x41800000, 0xEA;
            shr.b32 t, $8, 5;  lop3.b32 $3, t, 0x780000, 0x41800000, 0xEA;
            shr.b32 t, $8, 9;  lop3.b32 $7, t, 0x780000, 0x41800000, 0xEA;
            }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
        return low, high


@triton.jit  # type: ignore[untyped-decorator]
def _finish(acc, scales, bias, input_scale, row, GROUP: tl.constexpr, QUANTIZES_INPUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum the products of each row, and apply its scale and bias."""
    out = tl.sum(acc, 1)
    if QUANTIZES_INPUT:
        out *= input_scale
    if scales is not None and GROUP == 0:
        out *= tl.load(scales + row).to(tl.float32)
    if bias is not None:
        out += tl.load(bias + row).to(tl.float32)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _activate(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    else:
        return x


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


# Attention


@triton.jit  # type: ignore[untyped-decorator]
def _attention_kernel(  # type: ignore[no-untyped-def]
    qkv, query_norm, key_norm, frequencies, keys, values, tables, starts, counts,
    partial_outputs, partial_maxes, partial_sums, y, table_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, GROUP_ROWS: tl.constexpr,
    NORMS_HEADS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the key and value of a new token, and attend to it and the tokens in the cache.

    A program handles the queries that share a KV head, and a part of the tokens. Up to MIN_TOKENS tokens are one part,
    whose result is final; otherwise `_combine_kernel` adds the parts up. Queries and keys are held in halves, since the
    rotation pairs dimension i with i + HEAD_SIZE / 2.
    """
    HALF: tl.constexpr = HEAD_SIZE // 2
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    stored = tl.load(starts + sequence).to(tl.int32)
    first, splits = _visible_tokens(stored, WINDOW, SPLITS, MIN_TOKENS)
    if split >= splits:
        return
    tokens_per_split = tl.cdiv(tl.cdiv(stored - first, splits), TILE) * TILE
    begin = first + split * tokens_per_split
    end = tl.minimum(begin + tokens_per_split, stored)
    half, full, rows = tl.arange(0, HALF), tl.arange(0, HEAD_SIZE), tl.arange(0, GROUP_ROWS)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row_mask = (rows < GROUP)[:, None]
    base = qkv + sequence * (HEADS + 2 * KV_HEADS) * HEAD_SIZE
    DTYPE: tl.constexpr = keys.dtype.element_ty
    angles = frequencies
    if frequencies is not None:
        angles = stored.to(tl.float32) * tl.load(frequencies + half)
    head = kv_head * GROUP + rows
    query_1 = tl.load(base + head[:, None] * HEAD_SIZE + half[None, :], mask=row_mask, other=0.0)
    query_2 = tl.load(base + head[:, None] * HEAD_SIZE + HALF + half[None, :], mask=row_mask, other=0.0)
    query_1, query_2 = _norm_and_rotate(query_1, query_2, query_norm, angles, eps, HALF, NORMS_HEADS, DTYPE)

    scale = HEAD_SIZE**-0.5 * LOG2_E
    row_max = tl.full([GROUP_ROWS], -float("inf"), tl.float32)
    denominator = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, HEAD_SIZE], tl.float32)
    if split == 0:
        block = tl.load(tables + sequence * table_stride + stored // BLOCK_SIZE).to(tl.int64)
        slot = ((block * BLOCK_SIZE + stored % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_SIZE
        key_1, key_2, value = _store_token(
            base + (HEADS + kv_head) * HEAD_SIZE, keys + slot, values + slot, tl.load(counts + sequence) > 0, key_norm,
            angles, eps, KV_HEADS * HEAD_SIZE, HALF, NORMS_HEADS, DTYPE,
        )  # fmt: skip
        products = query_1.to(tl.float32) * key_1.to(tl.float32) + query_2.to(tl.float32) * key_2.to(tl.float32)
        row_max = tl.sum(products, 1) * scale
        denominator += 1.0
        acc += value.to(tl.float32)[None, :]
    for tile_start in range(begin, end, TILE):
        token = tile_start + tl.arange(0, TILE)
        mask = token < end
        block = tl.load(tables + sequence * table_stride + token // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
        slot = ((block * BLOCK_SIZE + token % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_SIZE
        key_1 = tl.load(keys + slot[:, None] + half[None, :], mask=mask[:, None], other=0.0)
        key_2 = tl.load(keys + slot[:, None] + HALF + half[None, :], mask=mask[:, None], other=0.0)
        score = tl.dot(query_1, tl.trans(key_1), input_precision="ieee")
        score = tl.dot(query_2, tl.trans(key_2), score, input_precision="ieee") * scale
        score = tl.where(mask[None, :], score, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        weight = tl.exp2(score - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        value = tl.load(values + slot[:, None] + full[None, :], mask=mask[:, None], other=0.0)
        acc = acc * rescale[:, None] + tl.dot(weight.to(DTYPE), value, input_precision="ieee")
        row_max, denominator = new_max, denominator * rescale + tl.sum(weight, 1)
    index = sequence * HEADS + head
    if splits == 1:
        out = acc / denominator[:, None]
        tl.store(y + index[:, None] * HEAD_SIZE + full[None, :], out.to(y.dtype.element_ty), mask=row_mask)
    else:
        part = index * SPLITS + split
        tl.store(partial_outputs + part[:, None] * HEAD_SIZE + full[None, :], acc, mask=row_mask)
        tl.store(partial_maxes + part, row_max, mask=rows < GROUP)
        tl.store(partial_sums + part, denominator, mask=rows < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _visible_tokens(stored, WINDOW: tl.constexpr, SPLITS: tl.constexpr, MIN_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first token that the one after `stored` tokens attends to, and the number of parts to split them into."""
    first = stored * 0
    if WINDOW:
        first = tl.maximum(stored + 1 - WINDOW, 0)
    return first, tl.minimum(tl.maximum(tl.cdiv(stored - first, MIN_TOKENS), 1), SPLITS)


@triton.jit  # type: ignore[untyped-decorator]
def _store_token(  # type: ignore[no-untyped-def]
    source, keys, values, is_stored, key_norm, angles, eps,
    VALUE_OFFSET: tl.constexpr, HALF: tl.constexpr, NORMS_HEADS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Store the new key and value of a head in the cache; both halves of the key, and the value."""
    first, full = tl.arange(0, HALF)[None, :], tl.arange(0, 2 * HALF)
    key_1, key_2 = tl.load(source + first), tl.load(source + HALF + first)
    key_1, key_2 = _norm_and_rotate(key_1, key_2, key_norm, angles, eps, HALF, NORMS_HEADS, DTYPE)
    value = tl.load(source + VALUE_OFFSET + full).to(DTYPE)
    if is_stored:
        tl.store(keys + first, key_1)
        tl.store(keys + HALF + first, key_2)
        tl.store(values + full, value)
    return key_1, key_2, value


@triton.jit  # type: ignore[untyped-decorator]
def _norm_and_rotate(  # type: ignore[no-untyped-def]
    first, second, norm_weight, angles, eps, HALF: tl.constexpr, NORMS_HEADS: tl.constexpr, DTYPE: tl.constexpr
):
    """Norm and rotary embedding of heads, in halves; rounded after each as the model does."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORMS_HEADS:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        rstd = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first, second = first * rstd, second * rstd
        if norm_weight is not None:
            half = tl.arange(0, HALF)
            first *= tl.load(norm_weight + half).to(tl.float32)[None, :]
            second *= tl.load(norm_weight + HALF + half).to(tl.float32)[None, :]
        first, second = first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)
    if angles is not None:
        cos, sin = tl.cos(angles)[None, :], tl.sin(angles)[None, :]
        first, second = first * cos - second * sin, second * cos + first * sin
    return first.to(DTYPE), second.to(DTYPE)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_kernel(  # type: ignore[no-untyped-def]
    partial_outputs, partial_maxes, partial_sums, starts, y,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, MIN_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add up the parts of `_attention_kernel`, in order; a sequence with one part is complete already."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sequence, head = tl.program_id(0), tl.program_id(1)
    _, splits = _visible_tokens(tl.load(starts + sequence).to(tl.int32), WINDOW, SPLITS, MIN_TOKENS)
    if splits > 1:
        split, full = tl.arange(0, SPLITS), tl.arange(0, HEAD_SIZE)
        part = (sequence * HEADS + head) * SPLITS + split
        mask = split < splits
        maxes = tl.load(partial_maxes + part, mask=mask, other=-float("inf"))
        weight = tl.exp2(maxes - tl.max(maxes, 0))
        denominator = tl.sum(weight * tl.load(partial_sums + part, mask=mask, other=0.0), 0)
        outputs = tl.load(partial_outputs + part[:, None] * HEAD_SIZE + full[None, :], mask=mask[:, None], other=0.0)
        out = tl.sum(outputs * weight[:, None], 0) / denominator
        tl.store(y + (sequence * HEADS + head) * HEAD_SIZE + full, out.to(y.dtype.element_ty))


# The next token


@triton.jit  # type: ignore[untyped-decorator]
def _max_logits_kernel(  # type: ignore[no-untyped-def]
    logits, maxes, tokens, vocab_size, stride, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The largest logit, and its token, of each of PARTS parts of the vocabulary; NaN if there is one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sequence, part = tl.program_id(0), tl.program_id(1)
    size = tl.cdiv(vocab_size, PARTS)
    best, best_token = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    not_a_number = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        token = part * size + offset
        logit = tl.load(
            logits + sequence * stride + token, mask=(offset < size) & (token < vocab_size), other=-float("inf")
        )
        logit = logit.to(tl.float32)
        not_a_number |= (logit != logit).to(tl.int32)
        best_token = tl.where(logit > best, token, best_token)
        best = tl.maximum(best, logit)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, best_token, 2147483647), 0)
    tl.store(maxes + sequence * PARTS + part, tl.where(tl.max(not_a_number, 0) > 0, float("nan"), largest))
    tl.store(tokens + sequence * PARTS + part, token)


@triton.jit  # type: ignore[untyped-decorator]
def _next_token_kernel(  # type: ignore[no-untyped-def]
    maxes, part_tokens, tokens, starts, counts, argmax, PARTS: tl.constexpr, PDL: tl.constexpr
):
    """The argmax of each sequence, -1 if its logits are not finite, and the inputs of the next step."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sequence, part = tl.program_id(0), tl.arange(0, PARTS)
    values = tl.load(maxes + sequence * PARTS + part)
    largest = tl.max(values, 0)
    token = tl.min(tl.where(values == largest, tl.load(part_tokens + sequence * PARTS + part), 2147483647), 0)
    finite = (tl.max((values != values).to(tl.int32), 0) == 0) & (tl.abs(largest) < float("inf"))
    token = tl.where(token == 2147483647, 0, token)
    tl.store(tokens + sequence, token)
    tl.store(starts + sequence, tl.load(starts + sequence) + tl.load(counts + sequence))
    tl.store(argmax + sequence, tl.where(finite, token, -1))
