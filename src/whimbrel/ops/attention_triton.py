"""Triton kernels for the paged KV cache: write new tokens to blocks, and decode-phase attention without a gather.

The tokens of a sequence are split among programs, so that a few long sequences still fill a GPU (as flash-decoding
does); each computes an online softmax over its split, and a second kernel combines the splits. Lengths and block tables
are read on the device: a captured CUDA graph works for sequences of any length. Codes of quantized caches are decoded
in registers.

Both are custom operators that declare which tensors they mutate: torch.compile cannot know that of a Triton kernel, and
would copy all blocks before each call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["load_cached", "paged_attention", "write_blocks_cuda"]

TILE = 32
"""Tokens per tile of a program."""
PROGRAMS = 256
"""Number of programs that fills a large GPU."""
MAX_SPLITS = 16
"""Maximum number of programs per sequence and KV head."""
LOG2_E = 1.4426950408889634


@torch.library.custom_op("whimbrel::write_blocks", mutates_args=("keys", "values"), device_types="cuda")
def write_blocks_cuda(
    keys: Tensor, values: Tensor, new_keys_THD: Tensor, new_values_THD: Tensor, slots_T: Tensor
) -> None:
    """Write keys and values of tokens to their slots in blocks (blocks, block size, kv heads, head size)."""
    heads, width = keys.shape[2:]
    new_keys, new_values = (x if x.stride(2) == 1 else x.contiguous() for x in (new_keys_THD, new_values_THD))
    tile = min(1024, triton.next_power_of_2(heads * width))
    _write_tokens_kernel[(len(slots_T), triton.cdiv(heads * width, tile))](
        keys, values, new_keys, new_values, slots_T,
        new_keys.stride(0), new_keys.stride(1), new_values.stride(0), new_values.stride(1),
        HEADS=heads, WIDTH=width, TILE=tile, num_warps=4,
    )  # fmt: skip


@torch.library.custom_op("whimbrel::paged_attention", mutates_args=())
def paged_attention(
    q_BHTD: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables_BN: Tensor,
    lengths_B: Tensor,
    window: int | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    codec: str = "none",
    group_size: int = 0,
) -> Tensor:
    """Attention of the newest token of each sequence.

    Keys and values are (blocks, block size, kv heads, head size), contiguous; or codes, with the name of their codec
    (int8, fp8 or int4) and the number of values that share a scale.
    """
    batch, heads, _, width = q_BHTD.shape
    assert all(x is None or x.is_contiguous() for x in (keys, values, key_scales, value_scales))
    block_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    splits = max(1, min(MAX_SPLITS, PROGRAMS // (batch * kv_heads)))
    y_BHTD = torch.empty_like(q_BHTD, memory_format=torch.contiguous_format)
    partial_outputs = y_BHTD
    if splits > 1:
        partial_outputs = q_BHTD.new_empty((batch, heads, splits, width), dtype=torch.float32)
    partial_maxes, partial_sums = (q_BHTD.new_empty((batch, heads, splits), dtype=torch.float32) for _ in range(2))
    padded_width = max(16, triton.next_power_of_2(width))
    _attention_split_kernel[(batch, kv_heads, splits)](
        q_BHTD, keys, values, key_scales, value_scales, block_tables_BN, lengths_B,
        partial_outputs, partial_maxes, partial_sums,
        q_BHTD.stride(0), q_BHTD.stride(1), block_tables_BN.stride(0),
        0 if window is None else window, SCALE=width**-0.5 * LOG2_E,
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), WIDTH=width, PADDED=padded_width,
        BLOCK_SIZE=block_size, SPLITS=splits, TILE=TILE, CODEC=codec, CODE_GROUP=group_size, num_warps=4,
    )  # fmt: skip
    if splits == 1:  # the only part is the result
        return y_BHTD
    _combine_splits_kernel[(batch * heads,)](
        partial_outputs, partial_maxes, partial_sums, y_BHTD, WIDTH=width, PADDED=padded_width, SPLITS=splits,
        PADDED_SPLITS=triton.next_power_of_2(splits), num_warps=1,
    )  # fmt: skip
    return y_BHTD


@paged_attention.register_fake
def _(q_BHTD: Tensor, *_: Tensor | int | str | None) -> Tensor:
    return torch.empty_like(q_BHTD, memory_format=torch.contiguous_format)


@triton.jit  # type: ignore[untyped-decorator]
def _write_tokens_kernel(  # type: ignore[no-untyped-def]
    keys, values, new_keys, new_values, slots,
    key_stride_token, key_stride_head, value_stride_token, value_stride_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token, offsets = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask, head, dim = offsets < HEADS * WIDTH, offsets // WIDTH, offsets % WIDTH
    target = tl.load(slots + token).to(tl.int64) * (HEADS * WIDTH) + offsets
    key = tl.load(new_keys + token * key_stride_token + head * key_stride_head + dim, mask=mask)
    value = tl.load(new_values + token * value_stride_token + head * value_stride_head + dim, mask=mask)
    tl.store(keys + target, key, mask=mask)
    tl.store(values + target, value, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _attention_split_kernel(  # type: ignore[no-untyped-def]
    q, keys, values, key_scales, value_scales, block_tables, lengths, partial_outputs, partial_maxes, partial_sums,
    q_stride_batch, q_stride_head, table_stride, window,
    SCALE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, CODEC: tl.constexpr, CODE_GROUP: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    tokens_per_split = tl.cdiv(tl.cdiv(length - first, SPLITS), TILE) * TILE
    start = first + split * tokens_per_split
    end = tl.minimum(start + tokens_per_split, length)
    dims, heads = tl.arange(0, PADDED), tl.arange(0, ROWS)
    head = kv_head * GROUP + heads
    mask = (heads < GROUP)[:, None] & (dims < WIDTH)[None, :]
    query = tl.load(q + row * q_stride_batch + head[:, None] * q_stride_head + dims[None, :], mask=mask, other=0.0)
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for tile_start in range(start, end, TILE):
        token = tile_start + tl.arange(0, TILE)
        token_mask = token < end
        block = tl.load(block_tables + row * table_stride + token // BLOCK_SIZE, mask=token_mask, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + token % BLOCK_SIZE) * tl.num_programs(1) + kv_head
        key = load_cached(keys, key_scales, slot, token_mask, 0, PADDED, WIDTH, CODEC, CODE_GROUP, query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * SCALE
        score = tl.where(token_mask[None, :], score, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        weight = tl.exp2(score - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        value = load_cached(values, value_scales, slot, token_mask, 0, PADDED, WIDTH, CODEC, CODE_GROUP, query.dtype)
        acc = acc * rescale[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        denominator = denominator * rescale + tl.sum(weight, 1)
        row_max = new_max
    slot = (row * tl.num_programs(1) * GROUP + head) * SPLITS + split
    if SPLITS == 1:
        acc /= tl.maximum(denominator, 1e-30)[:, None]  # zeros for a sequence without tokens (padding of the batch)
    else:
        tl.store(partial_maxes + slot, row_max, mask=heads < GROUP)
        tl.store(partial_sums + slot, denominator, mask=heads < GROUP)
    result = acc.to(partial_outputs.dtype.element_ty)
    tl.store(partial_outputs + slot[:, None] * WIDTH + dims[None, :], result, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def load_cached(  # type: ignore[no-untyped-def]
    stored, scales, slot, token_mask,
    FIRST: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, CODEC: tl.constexpr, CODE_GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Keys or values of one head (tokens, SIZE), from dimension FIRST on, zeros from WIDTH on.

    `slot` counts heads of tokens. See `ops.lowbit` for the codecs.
    """
    dims = FIRST + tl.arange(0, SIZE)
    mask = token_mask[:, None] & (dims < WIDTH)[None, :]
    if CODEC == "none":
        return tl.load(stored + slot[:, None] * WIDTH + dims[None, :], mask=mask, other=0.0)
    else:
        TOKENS: tl.constexpr = slot.shape[0]
        ALL_GROUPS: tl.constexpr = (WIDTH + CODE_GROUP - 1) // CODE_GROUP
        GROUPS: tl.constexpr = max(1, SIZE // CODE_GROUP)
        group = FIRST // CODE_GROUP + tl.arange(0, GROUPS)[None, :]
        group_mask = token_mask[:, None] & (group < ALL_GROUPS)
        if CODEC == "int4":
            byte = FIRST // 2 + tl.arange(0, SIZE // 2)[None, :]
            byte_mask = token_mask[:, None] & (byte < WIDTH // 2)
            pairs = tl.load(stored + slot[:, None] * (WIDTH // 2) + byte, mask=byte_mask, other=0)
            codes = tl.join(pairs & 15, pairs >> 4)
            row = scales + slot[:, None] * (2 * ALL_GROUPS + 6)
            minimum = tl.load(row + group, mask=group_mask, other=0).to(tl.float32)
            step = tl.load(row + ALL_GROUPS + group, mask=group_mask, other=0).to(tl.float32)
            shared = row + 2 * ALL_GROUPS
            base, unit = _load_bf16_bytes(shared, group_mask), _load_bf16_bytes(shared + 2, group_mask)
            minimum, step = base + minimum * unit, step * _load_bf16_bytes(shared + 4, group_mask)
            values = tl.reshape(codes.to(tl.float32), [TOKENS, GROUPS, SIZE // GROUPS])
            values = minimum[:, :, None] + values * step[:, :, None]
        else:
            codes = tl.load(stored + slot[:, None] * WIDTH + dims[None, :], mask=mask, other=0)
            if CODEC == "fp8":
                codes = codes.to(tl.float8e4nv, bitcast=True)
            step = tl.load(scales + slot[:, None] * ALL_GROUPS + group, mask=group_mask, other=0.0).to(tl.float32)
            values = tl.reshape(codes.to(tl.float32), [TOKENS, GROUPS, SIZE // GROUPS]) * step[:, :, None]
        return tl.where(mask, tl.reshape(values, [TOKENS, SIZE]), 0.0).to(DTYPE)


@triton.jit
def _load_bf16_bytes(pointers, mask):  # type: ignore[no-untyped-def]
    """bf16 numbers at addresses that need not be even, as fp32."""
    low, high = (tl.load(pointers, mask=mask, other=0), tl.load(pointers + 1, mask=mask, other=0))
    return ((high.to(tl.int32) << 24) | (low.to(tl.int32) << 16)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_splits_kernel(  # type: ignore[no-untyped-def]
    partial_outputs, partial_maxes, partial_sums, y,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    split, dims = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED)
    split_mask = split < SPLITS
    split_max = tl.load(partial_maxes + head * SPLITS + split, mask=split_mask, other=-float("inf"))
    # A sequence without tokens (padding of the batch) has no maximum: return zeros.
    weight = tl.where(split_max > -float("inf"), tl.exp2(split_max - tl.max(split_max, 0)), 0.0)
    denominator = tl.sum(weight * tl.load(partial_sums + head * SPLITS + split, mask=split_mask, other=0.0), 0)
    mask = split_mask[:, None] & (dims < WIDTH)[None, :]
    partial = tl.load(partial_outputs + (head * SPLITS + split)[:, None] * WIDTH + dims[None, :], mask=mask, other=0.0)
    output = tl.sum(partial * weight[:, None], 0) / tl.maximum(denominator, 1e-30)
    tl.store(y + head * WIDTH + dims, output.to(y.dtype.element_ty), mask=dims < WIDTH)
