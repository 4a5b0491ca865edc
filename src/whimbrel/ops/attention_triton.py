"""Triton kernels for the paged KV cache: write new tokens to blocks, and decode-phase attention without a gather.

The tokens of a sequence are split among programs, so that a few long sequences still fill a GPU (as flash-decoding
does); each computes an online softmax over its split, and a second kernel combines the splits. Lengths and block tables
are read on the device: a captured CUDA graph works for sequences of any length.

Both are custom operators that declare which tensors they mutate: torch.compile cannot know that of a Triton kernel, and
would copy all blocks before each call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["paged_attention", "write_blocks_cuda"]

BLOCK = 32
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
    block = min(1024, triton.next_power_of_2(heads * width))
    _write_tokens_kernel[(len(slots_T), triton.cdiv(heads * width, block))](
        keys, values, new_keys, new_values, slots_T,
        new_keys.stride(0), new_keys.stride(1), new_values.stride(0), new_values.stride(1),
        HEADS=heads, WIDTH=width, BLOCK=block, num_warps=4,
    )  # fmt: skip


@torch.library.custom_op("whimbrel::paged_attention", mutates_args=(), device_types="cuda")
def paged_attention(
    q_BHTD: Tensor, keys: Tensor, values: Tensor, block_tables_BP: Tensor, lengths_B: Tensor, window: int | None = None
) -> Tensor:
    """Attention of the newest token of each sequence; keys and values are (blocks, block size, kv heads, head size)."""
    batch, heads, _, width = q_BHTD.shape
    page_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    splits = max(1, min(MAX_SPLITS, PROGRAMS // (batch * kv_heads)))
    parts = q_BHTD.new_empty((batch, heads, splits, width), dtype=torch.float32)
    peaks, sums = (q_BHTD.new_empty((batch, heads, splits), dtype=torch.float32) for _ in range(2))
    padded_width = max(16, triton.next_power_of_2(width))
    _attention_split_kernel[(batch, kv_heads, splits)](
        q_BHTD, keys, values, block_tables_BP, lengths_B, parts, peaks, sums,
        q_BHTD.stride(0), q_BHTD.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), block_tables_BP.stride(0),
        0 if window is None else window, SCALE=width**-0.5 * LOG2_E,
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), WIDTH=width, PADDED=padded_width,
        PAGE=page_size, SPLITS=splits, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    y_BHTD = torch.empty_like(q_BHTD, memory_format=torch.contiguous_format)
    _combine_splits_kernel[(batch * heads,)](
        parts, peaks, sums, y_BHTD, WIDTH=width, PADDED=padded_width, SPLITS=splits,
        PADDED_SPLITS=triton.next_power_of_2(splits), num_warps=1,
    )  # fmt: skip
    return y_BHTD


@paged_attention.register_fake
def _(q_BHTD: Tensor, *_: Tensor | int | None) -> Tensor:
    return torch.empty_like(q_BHTD, memory_format=torch.contiguous_format)


@triton.jit  # type: ignore[untyped-decorator]
def _write_tokens_kernel(  # type: ignore[no-untyped-def]
    keys, values, new_keys, new_values, slots, key_token, key_head, value_token, value_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within, head, dim = at < HEADS * WIDTH, at // WIDTH, at % WIDTH
    place = tl.load(slots + token).to(tl.int64) * (HEADS * WIDTH) + at
    key = tl.load(new_keys + token * key_token + head * key_head + dim, mask=within)
    value = tl.load(new_values + token * value_token + head * value_head + dim, mask=within)
    tl.store(keys + place, key, mask=within)
    tl.store(values + place, value, mask=within)


@triton.jit  # type: ignore[untyped-decorator]
def _attention_split_kernel(  # type: ignore[no-untyped-def]
    q, keys, values, pages, lengths, parts, peaks, sums,
    q_row, q_head, page_stride, token_stride, head_stride, table_row, window,
    SCALE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    start = first + split * share
    end = tl.minimum(start + share, length)
    dims, heads = tl.arange(0, PADDED), tl.arange(0, ROWS)
    head = kv_head * GROUP + heads
    within = (heads < GROUP)[:, None] & (dims < WIDTH)[None, :]
    query = tl.load(q + row * q_row + head[:, None] * q_head + dims[None, :], mask=within, other=0.0)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, PADDED], tl.float32)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        there = token < end
        page = tl.load(pages + row * table_row + token // PAGE, mask=there, other=0).to(tl.int64)
        place = page * page_stride + (token % PAGE) * token_stride + kv_head * head_stride
        held = there[:, None] & (dims < WIDTH)[None, :]
        key = tl.load(keys + place[:, None] + dims[None, :], mask=held, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * SCALE
        score = tl.where(there[None, :], score, -float("inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(peak - higher)
        value = tl.load(values + place[:, None] + dims[None, :], mask=held, other=0.0)
        found = found * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        peak = higher
    slot = (row * tl.num_programs(1) * GROUP + head) * SPLITS + split
    tl.store(parts + slot[:, None] * WIDTH + dims[None, :], found, mask=within)
    tl.store(peaks + slot, peak, mask=heads < GROUP)
    tl.store(sums + slot, total, mask=heads < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_splits_kernel(  # type: ignore[no-untyped-def]
    parts, peaks, sums, y, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0)
    split, dims = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED)
    there = split < SPLITS
    peak = tl.load(peaks + head * SPLITS + split, mask=there, other=-float("inf"))
    # A sequence without tokens (padding of the batch) has no maximum: return zeros.
    weight = tl.where(peak > -float("inf"), tl.exp2(peak - tl.max(peak, 0)), 0.0)
    total = tl.sum(weight * tl.load(sums + head * SPLITS + split, mask=there, other=0.0), 0)
    within = there[:, None] & (dims < WIDTH)[None, :]
    part = tl.load(parts + (head * SPLITS + split)[:, None] * WIDTH + dims[None, :], mask=within, other=0.0)
    found = tl.sum(part * weight[:, None], 0) / tl.maximum(total, 1e-30)
    tl.store(y + head * WIDTH + dims, found.to(y.dtype.element_ty), mask=dims < WIDTH)
