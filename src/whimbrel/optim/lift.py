"""From a direction in the subspace back to the whole weight.

Every lift has the form  D = A Q^T + c * G  with a small A (m x r) and at most one factor c for each row, so the whole
direction D need never exist at once: rows can be made, spent and forgotten a few at a time. With N the rule's direction
for R = G Q, and norms taken over rows i:
    back           A = N                                     (GaLore)
    fira           A = N - c R,  c_i = |N_i| / |R_i|         (Chen et al., 2024: the residual G - R Q^T, scaled alike)
    apollo         A = 0,        c_i = |N_i| / |R_i|         (Zhu et al., 2024)
    apollo_mini    A = 0,        c   = |N| / |R|
Fira and APOLLO bound how fast the length of what c scales may grow from one step to the next (by 1.01).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.optim.shards import Shard, add_up

__all__ = ["LIFTS", "Lifted", "lift"]

LIFTS = ("back", "fira", "apollo", "apollo_mini")
GROWTH = 1.01
"""How much longer than in the step before what c scales may be."""
TINY = 1e-30


class Lifted(NamedTuple):
    """A and c of D = A Q^T + c * G; None where they are zero."""

    low: Tensor | None
    factor: Tensor | None


def lift(
    kind: str,
    direction: Tensor,
    low: Tensor,
    grad: Tensor,
    length: Tensor,
    shard: Shard | None = None,
) -> Lifted:
    """A and c. `length` is the length that c * G (or the residual) had in the last step, 0 at first; it is renewed."""

    def norm(tensor: Tensor) -> Tensor:
        if kind == "apollo_mini":
            return add_up(tensor.square().sum(dim=(-2, -1), keepdim=True), shard).sqrt()
        return tensor.square().sum(dim=-1, keepdim=True).sqrt()

    factor = norm(direction) / norm(low).clamp(min=TINY)
    squares = grad.float().square().sum(dim=-1, keepdim=True)
    if kind == "fira":  # Q has orthonormal columns, so what G has beside its span is what is left of its length
        squares = (squares - low.square().sum(dim=-1, keepdim=True)).clamp(min=0)
    scaled = add_up((factor.square() * squares).sum(dim=-2, keepdim=True), shard).sqrt()
    longest = GROWTH * length.view_as(scaled)
    bound = torch.where((longest > 0) & (scaled > longest), longest / scaled.clamp(min=TINY), 1.0)
    length.copy_((scaled * bound).view_as(length))
    factor = factor * bound
    return Lifted(direction - factor * low if kind == "fira" else None, factor.expand(*low.shape[:-1], 1))
