"""Attention over a key-value cache: what may be read of it (`View`), reading it (`attend`), writing pages (`store`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from whimbrel.ops.lowbit import GroupCodec

__all__ = ["View", "attend", "attend_reference", "store"]


@dataclass(frozen=True, slots=True)
class View:
    """What attention may read of one layer of a cache, the newest tokens included.

    Without `pages`, slot i of S holds the token that `key_positions` says; where that is None, the S newest tokens lie
    in order. With `pages`, the token at position p of row b lies in page `pages[b, p // page size]`.
    """

    keys: Tensor
    """(batch, kv heads, slots, head size), or (pages, page size, kv heads, head size); codes where there is a codec."""
    values: Tensor
    """As `keys`."""
    key_positions: Tensor | None = None
    """(slots,) or (batch, slots): the position of the token in each slot, negative where there is none to see."""
    lengths: Tensor | None = None
    """(batch,), with pages: how many tokens each row holds."""
    pages: Tensor | None = None
    """(batch, pages of a row): where the tokens of each row lie."""
    key_scales: Tensor | None = None
    """Scales of the codes in `keys`, laid out as they are."""
    value_scales: Tensor | None = None
    """Scales of the codes in `values`."""
    codec: GroupCodec | None = None
    """Turns codes into numbers; None where keys and values are numbers."""

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values as numbers, (batch, kv heads, slots, head size)."""
        return self._dense(self.keys, self.key_scales, dtype), self._dense(self.values, self.value_scales, dtype)

    def _dense(self, stored: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        stored = self._gather(stored)
        if self.codec is None or scales is None:
            return stored
        return self.codec.decode(stored, self._gather(scales), dtype)

    def _gather(self, stored: Tensor) -> Tensor:
        if self.pages is None:
            return stored
        return stored[self.pages.long()].flatten(1, 2).transpose(1, 2)


def store(keys: Tensor, values: Tensor, new_keys_THX: Tensor, new_values_THX: Tensor, slots_T: Tensor) -> None:
    """Write what is kept of tokens to their slots of pages (pages, page size, kv heads, ...), page by page counted."""
    if keys.is_cuda:
        from whimbrel.ops.attention_triton import store_pages

        store_pages(keys, values, new_keys_THX, new_values_THX, slots_T)
        return
    for pages, new in ((keys, new_keys_THX), (values, new_values_THX)):
        pages.flatten(0, 1)[slots_T] = new


def attend(q_BHTD: Tensor, view: View, positions: Tensor, *, window: int | None = None) -> Tensor:
    """Attend the queries at `positions`, (T,) or (batch, T), over what `view` shows.

    A query at position q sees keys at positions 0 to q, at most `window` of them.
    """
    one_by_one = q_BHTD.size(2) == 1 and view.codec is None and q_BHTD.is_cuda
    if one_by_one and view.pages is not None and view.lengths is not None:
        from whimbrel.ops.attention_triton import attend_pages

        found: Tensor = attend_pages(q_BHTD, view.keys, view.values, view.pages, view.lengths, window)
        return found
    return attend_reference(q_BHTD, view, positions, window=window)


def attend_reference(q_BHTD: Tensor, view: View, positions: Tensor, *, window: int | None = None) -> Tensor:
    """`attend` in plain torch: pages are gathered, codes decoded."""
    k, v = view.dense(q_BHTD.dtype)
    tokens, slots = q_BHTD.size(2), k.size(2)
    in_order = view.pages is None and view.key_positions is None
    mask = None
    if not in_order or tokens not in (1, slots) or (window is not None and window < slots):
        mask = _mask(view, positions, slots, window)
    causal = mask is None
    if tokens == 1:  # a branch: where lengths vary, `and` would give torch.compile a symbol, which attention refuses
        causal = False
    return F.scaled_dot_product_attention(q_BHTD, k, v, mask, is_causal=causal, enable_gqa=q_BHTD.size(1) != k.size(1))


def _mask(view: View, positions: Tensor, slots: int, window: int | None) -> Tensor:
    """True where a query may look: (T, slots) or (batch, 1, T, slots)."""
    keys = view.key_positions
    if keys is None:
        keys = torch.arange(slots, device=positions.device)
        if view.pages is None:
            keys = keys + (positions[..., -1:] + 1 - slots)
    distance = positions[..., :, None] - keys[..., None, :]
    mask = (distance >= 0) & (keys >= 0)[..., None, :]
    if window is not None:
        mask &= distance < window
    # A query that stands nowhere (padding) would see nothing and come out as NaN: let it see everything instead.
    mask |= (positions < 0)[..., :, None]
    return mask if mask.dim() == 2 else mask[:, None]
