"""Attention over a KV cache (`KVView`, `attend`, `write_blocks`), and within the documents of packed rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from whimbrel.ops.lowbit import GroupCodec

__all__ = [
    "KVView",
    "attend",
    "attend_reference",
    "can_attend_packed",
    "cumulative_lengths",
    "packed_attention",
    "write_blocks",
]


@dataclass(frozen=True, slots=True)
class KVView:
    """Keys and values of one cache layer that attention reads, including the newest tokens.

    Contiguous cache: slot i has the token at position `key_positions[i]`; if that is None, the slots are the newest
    tokens in order. Paged cache: the token at position p of sequence b is in block `block_tables[b, p // block size]`.
    """

    keys: Tensor
    """(batch, kv heads, slots, head size), or (blocks, block size, kv heads, head size); with a codec, codes."""
    values: Tensor
    """Like `keys`."""
    key_positions: Tensor | None = None
    """(slots,) or (batch, slots): the position of the token in each slot, negative if the slot is not visible."""
    lengths: Tensor | None = None
    """(batch,), paged only: number of tokens in each sequence."""
    block_tables: Tensor | None = None
    """(batch, blocks per sequence): the blocks of each sequence, in order."""
    key_scales: Tensor | None = None
    """Scales of the codes in `keys`, in the same layout."""
    value_scales: Tensor | None = None
    """Scales of the codes in `values`."""
    codec: GroupCodec | None = None
    """Decodes keys and values; None if they are not quantized."""

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Decoded keys and values, (batch, kv heads, slots, head size)."""
        return self._dense(self.keys, self.key_scales, dtype), self._dense(self.values, self.value_scales, dtype)

    def _dense(self, stored: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        stored = self._gather(stored)
        if self.codec is None or scales is None:
            return stored
        return self.codec.decode(stored, self._gather(scales), dtype)

    def _gather(self, stored: Tensor) -> Tensor:
        if self.block_tables is None:
            return stored
        return stored[self.block_tables.long()].flatten(1, 2).transpose(1, 2)


def write_blocks(keys: Tensor, values: Tensor, new_keys_THX: Tensor, new_values_THX: Tensor, slots_T: Tensor) -> None:
    """Write tokens to their slots in blocks (blocks, block size, kv heads, ...); slot = block * block size + offset."""
    if keys.is_cuda:
        from whimbrel.ops.attention_triton import write_blocks_cuda

        write_blocks_cuda(keys, values, new_keys_THX, new_values_THX, slots_T)
        return
    for blocks, new in ((keys, new_keys_THX), (values, new_values_THX)):
        blocks.flatten(0, 1)[slots_T] = new


def attend(q_BHTD: Tensor, view: KVView, positions: Tensor, *, window: int | None = None) -> Tensor:
    """Attention of queries at `positions`, (T,) or (batch, T), over the keys and values of `view`.

    A query at position q attends to keys at positions 0 to q, or only to the last `window` of them.
    """
    decoding = q_BHTD.size(2) == 1 and q_BHTD.is_cuda
    if decoding and view.block_tables is not None and view.lengths is not None:
        from whimbrel.ops.attention_triton import paged_attention

        name, group_size = ("none", 0) if view.codec is None else (view.codec.name, view.codec.group_size or 0)
        y_BHTD: Tensor = paged_attention(
            q_BHTD, view.keys, view.values, view.block_tables, view.lengths, window, view.key_scales,
            view.value_scales, name, group_size,
        )  # fmt: skip
        return y_BHTD
    return attend_reference(q_BHTD, view, positions, window=window)


def attend_reference(q_BHTD: Tensor, view: KVView, positions: Tensor, *, window: int | None = None) -> Tensor:
    """`attend` in torch: gathers blocks, decodes codes, and calls scaled_dot_product_attention."""
    k, v = view.dense(q_BHTD.dtype)
    tokens, slots = q_BHTD.size(2), k.size(2)
    in_order = view.block_tables is None and view.key_positions is None
    mask = None
    if not in_order or tokens not in (1, slots) or (window is not None and window < slots):
        mask = _mask(view, positions, slots, window)
    causal = mask is None
    if tokens == 1:  # not `and`: with dynamic shapes torch.compile would pass a symbolic bool, which is not accepted
        causal = False
    return F.scaled_dot_product_attention(q_BHTD, k, v, mask, is_causal=causal, enable_gqa=q_BHTD.size(1) != k.size(1))


def _mask(view: KVView, positions: Tensor, slots: int, window: int | None) -> Tensor:
    """True where a query may attend: (T, slots) or (batch, 1, T, slots)."""
    keys = view.key_positions
    if keys is None:
        keys = torch.arange(slots, device=positions.device)
        if view.block_tables is None:
            keys = keys + (positions[..., -1:] + 1 - slots)
    distance = positions[..., :, None] - keys[..., None, :]
    mask = (distance >= 0) & (keys >= 0)[..., None, :]
    if window is not None:
        mask &= distance < window
    # A padding query would attend to nothing and yield NaN, so let it attend to everything.
    mask |= (positions < 0)[..., :, None]
    return mask if mask.dim() == 2 else mask[:, None]


# Packed rows: several documents per row, without attention between them


def can_attend_packed(x: Tensor, head_size: int) -> bool:
    """Whether `packed_attention` supports queries of the device and dtype of `x`, and flash attention is enabled."""
    supported = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and head_size <= 256 and head_size % 8 == 0
    # The number of documents is known only on the device: reading it would break a compiled graph.
    return supported and torch.backends.cuda.flash_sdp_enabled() and not torch.compiler.is_compiling()


def cumulative_lengths(documents_BT: Tensor) -> Tensor:
    """`cu_seqlens` of flash attention: offsets of the documents in the flattened batch, (documents + 1,), int32.

    A document starts where the number changes, and at the start of a row. Synchronizes with the GPU.
    """
    if has_torch_function_unary(documents_BT):
        return handle_torch_function(cumulative_lengths, (documents_BT,), documents_BT)
    starts_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    starts_BT[:, 1:] = documents_BT.diff(dim=1) != 0
    starts = starts_BT.flatten().nonzero().flatten()
    cu_seqlens = F.pad(starts, (0, 1), value=documents_BT.numel()).int()
    torch._dynamo.mark_dynamic(cu_seqlens, 0)  # compile once for any number of documents
    return cu_seqlens


def packed_attention(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, cu_seqlens: Tensor, window: int | None = None
) -> Tensor:
    """Causal attention within documents, with variable-length (varlen) flash attention.

    Equal to `scaled_dot_product_attention` with a block-diagonal mask, but skips the masked blocks.
    `cu_seqlens` is from `cumulative_lengths`; a query attends to the last `window` tokens of its document.
    """
    if not torch.compiler.is_compiling() and has_torch_function_unary(q_BHTD):
        return handle_torch_function(packed_attention, (q_BHTD,), q_BHTD, k_BHTD, v_BHTD, cu_seqlens, window)
    B, _, T, _ = q_BHTD.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTD, k_BHTD, v_BHTD))
    y, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, T, T,
        dropout_p=0.0, is_causal=True, return_debug_mask=False,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )  # fmt: skip
    y_BHTD: Tensor = y.unflatten(0, (B, T)).transpose(1, 2)
    return y_BHTD
