"""Which keys a query may see, as boolean masks for attention."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attention_mask"]


def attention_mask(
    positions_T: Tensor, num_keys: int, *, window: int | None = None, documents_BT: Tensor | None = None
) -> Tensor | None:
    """True where the query may look, shape (T, S) or (B, 1, T, S); None when plain causal attention says the same.

    Queries stand at the last T of the `num_keys` positions. A query sees itself and what came before, at most `window`
    tokens in all, and only its own document.
    """
    num_queries = positions_T.numel()
    if window is not None and window >= num_keys:
        window = None
    if documents_BT is None and window is None and num_queries in (1, num_keys):
        return None
    distance_TS = positions_T[:, None] - torch.arange(num_keys, device=positions_T.device)
    mask = distance_TS >= 0
    if window is not None:
        mask &= distance_TS < window
    if documents_BT is not None:
        mask = mask & (documents_BT[:, None, :, None] == documents_BT[:, None, None, :])
    return mask
