"""Tensor functions: a reference implementation in torch, and a fast path behind the same name."""

from whimbrel.ops.attention import KVView, attend, attend_reference, write_blocks
from whimbrel.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

__all__ = [
    "KVView",
    "attend",
    "attend_reference",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "write_blocks",
]
