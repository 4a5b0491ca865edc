"""Pure tensor functions: a plain reference first, then the fast path behind the same name."""

from whimbrel.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from whimbrel.ops.orthogonal import orthogonalise

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference", "orthogonalise"]
