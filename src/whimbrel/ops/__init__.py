"""Pure tensor functions: a plain reference first, then the fast path behind the same name."""

from whimbrel.ops.attention import View, attend, attend_reference, store
from whimbrel.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from whimbrel.ops.kernels import kernels_of
from whimbrel.ops.orthogonal import orthogonalise

__all__ = [
    "View",
    "attend",
    "attend_reference",
    "kernels_of",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "orthogonalise",
    "store",
]
