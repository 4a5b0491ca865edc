"""Where documents begin inside rows of tokens."""

from __future__ import annotations

from torch import Tensor

__all__ = ["document_ids"]


def document_ids(x_BT: Tensor, eot_id: int) -> Tensor:
    """Number the documents of each row: 0 for what continues from before the row, one more at every end-of-text.

    Two tokens of a row belong to one document, and may attend to each other, exactly where their numbers are equal.
    """
    return (x_BT == eot_id).cumsum(dim=-1)
