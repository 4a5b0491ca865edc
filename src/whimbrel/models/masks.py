"""Which keys a query may see, as boolean masks for attention."""

from __future__ import annotations

from torch import Tensor

__all__ = ["attention_mask"]


def attention_mask(
    positions_T: Tensor, *, window: int | None = None, documents_BT: Tensor | None = None
) -> Tensor | None:
    """True where a token may look, shape (T, T) or (B, 1, T, T); None when plain causal attention says the same.

    A token sees itself and what came before, at most `window` tokens in all, and only its own document.
    """
    if window is not None and window >= positions_T.numel():
        window = None
    if documents_BT is None and window is None:
        return None
    distance_TT = positions_T[:, None] - positions_T
    mask = distance_TT >= 0
    if window is not None:
        mask &= distance_TT < window
    if documents_BT is not None:
        mask = mask & (documents_BT[:, None, :, None] == documents_BT[:, None, None, :])
    return mask
