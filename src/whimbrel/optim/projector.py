"""A gradient and its image in the space of its leading singular vectors (Zhao et al., 2024, "GaLore").

For a gradient G (m x n) with the singular value decomposition G = U S V^T, cut after r vectors:
    right:  R = G V_r            back:  G' = R V_r^T
    left:   R = U_r^T G          back:  G' = U_r R
    full:   R = U_r^T G V_r      back:  G' = U_r R V_r^T
Just after a refresh G' is the best approximation of G of rank r. Between refreshes the basis stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor

from whimbrel.base.errors import OptimizerError

__all__ = ["Basis", "GaLoreProjector", "PROJECTION_TYPES", "low_rank", "matrix_shape", "projected_shapes", "side_of"]

PROJECTION_TYPES = ("std", "reverse_std", "right", "left", "full")
"""std projects the longer side away, reverse_std the other one; the rest say the side."""

Basis: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""V_r^T (r x n) of right, U_r (m x r) of left, or U_r and V_r^T of full."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A matrix or a stack of matrices as it is, a convolution as (out, rest)."""
    return tuple(shape) if len(shape) <= 3 else (shape[0], math.prod(shape[1:]))


def side_of(projection_type: str, shape: Sequence[int]) -> str:
    """The side that a matrix of `shape` is projected from: right, left or full; leading dimensions are a stack."""
    if len(shape) < 2:
        raise OptimizerError(
            f"a tensor of the shape {tuple(shape)} has no sides to project: give two dimensions or more"
        )
    tall = shape[-2] >= shape[-1]
    if projection_type == "std":
        return "right" if tall else "left"
    if projection_type == "reverse_std":
        return "left" if tall else "right"
    return projection_type


def projected_shapes(
    projection_type: str, rank: int, shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The shape of the image of a gradient of `shape`, and the shapes of its basis: one, or two for full."""
    side = side_of(projection_type, shape)
    *stack, rows, columns = shape
    rank = min(rank, rows, columns)
    left, right = (*stack, rows, rank), (*stack, rank, columns)
    if side == "full":
        return (*stack, rank, rank), (left, right)
    return (right, (left,)) if side == "left" else (left, (right,))


class GaLoreProjector:
    """Projects the gradients of one parameter, and refreshes its basis every `update_proj_gap` steps.

    Matrices, or stacks of matrices of which each has a basis of its own. `ortho_matrix` is all that it remembers.
    """

    def __init__(
        self, rank: int = 128, update_proj_gap: int = 50, scale: float = 1.0, projection_type: str = "std"
    ) -> None:
        whole: dict[str, Any] = {"rank": rank, "update_proj_gap": update_proj_gap}
        for name, value in whole.items():
            if not isinstance(value, Integral) or int(value) < 1:
                raise OptimizerError(f"{name} = {value!r} must be a whole number of at least 1")
        if projection_type not in PROJECTION_TYPES:
            raise OptimizerError(f"projection_type = {projection_type!r} is not one of {', '.join(PROJECTION_TYPES)}")
        self.rank = rank
        self.update_proj_gap = update_proj_gap
        self.scale = scale
        self.projection_type = projection_type
        self.ortho_matrix: Basis | None = None

    def project(self, grad: Tensor, steps: int) -> Tensor:
        """The low-rank image of `grad`, after a refresh where there is no basis or `steps` is a multiple of the gap."""
        return self._project(grad, steps, side_of(self.projection_type, grad.shape))

    def project_back(self, low_rank_grad: Tensor) -> Tensor:
        """What `low_rank_grad` is the image of, times `scale`."""
        if self.ortho_matrix is None:
            raise OptimizerError("there is no basis to project back from: call project() first")
        left, right = _split(self.ortho_matrix, self._side_back(low_rank_grad))
        full_rank_grad = low_rank_grad if left is None else left @ low_rank_grad
        full_rank_grad = full_rank_grad if right is None else full_rank_grad @ right
        return full_rank_grad.mul_(self.scale)

    def get_low_rank_grad_std(self, grad: Tensor, steps: int) -> Tensor:
        """`project`, the longer side away."""
        return self._project(grad, steps, side_of("std", grad.shape))

    def get_low_rank_grad_reverse_std(self, grad: Tensor, steps: int) -> Tensor:
        """`project`, the shorter side away."""
        return self._project(grad, steps, side_of("reverse_std", grad.shape))

    def get_low_rank_grad_right(self, grad: Tensor, steps: int) -> Tensor:
        """`project` to G V_r."""
        return self._project(grad, steps, "right")

    def get_low_rank_grad_left(self, grad: Tensor, steps: int) -> Tensor:
        """`project` to U_r^T G."""
        return self._project(grad, steps, "left")

    def get_low_rank_grad_full(self, grad: Tensor, steps: int) -> Tensor:
        """`project` to U_r^T G V_r."""
        return self._project(grad, steps, "full")

    @staticmethod
    def get_orthogonal_matrix(weights: Tensor, rank: int, projection_type: str) -> Basis:
        """The leading singular vectors of `weights`: the first `rank` rows of V^T, columns of U, or both.

        Returned in the dtype and on the device of `weights`, with storage of their own. Elements that are not finite
        count as zero: there is no decomposition of them.

        fp32 is decomposed in fp64. A singular vector is determined up to eps |G| / gap, with `gap` the distance to the
        next singular value; in fp32 a gap of 1% already costs 2e-5 of the best approximation, and 1e-5 costs 3e-2.
        """
        if projection_type not in ("right", "left", "full"):
            raise OptimizerError(f"projection_type = {projection_type!r} is not one of right, left, full")
        wide = torch.float64 if weights.dtype.itemsize > 2 and weights.device.type != "mps" else torch.float32
        matrix = weights.detach().to(wide)
        u, _, vh = torch.linalg.svd(matrix.nan_to_num(0.0, 0.0, 0.0), full_matrices=False)
        if projection_type == "full":
            return _own(u[..., :rank], weights.dtype), _own(vh[..., :rank, :], weights.dtype)
        return _own(u[..., :rank] if projection_type == "left" else vh[..., :rank, :], weights.dtype)

    def _project(self, grad: Tensor, steps: int, side: str) -> Tensor:
        due = steps % self.update_proj_gap == 0
        if self.ortho_matrix is None or (due and bool(grad.isfinite().all())):
            self.ortho_matrix = self.get_orthogonal_matrix(grad, self.rank, side)
        return low_rank(grad, *_split(self.ortho_matrix, side))

    def _side_back(self, low_rank_grad: Tensor) -> str:
        """The side that `low_rank_grad` came from, by shapes alone: r is at most m and at most n.

        An image of std is m x r (m >= n >= r) or r x n (r <= m < n), so it keeps the proportions of its gradient;
        a basis of reverse_std is m x r (m >= n >= r) or r x n (r <= m < n), so it has them too.
        """
        if self.projection_type == "reverse_std" and isinstance(self.ortho_matrix, Tensor):
            return side_of("reverse_std", self.ortho_matrix.shape)
        return side_of(self.projection_type, low_rank_grad.shape)


def low_rank(grad: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """U_r^T G V_r, where None stands for the identity."""
    low = grad if left is None else left.mT @ grad
    return low if right is None else low @ right.mT


def _own(part: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that does not keep the whole of U or V^T alive."""
    return part.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _split(basis: Basis, side: str) -> tuple[Tensor | None, Tensor | None]:
    """U_r and V_r^T, as far as the side has them."""
    if isinstance(basis, Tensor):
        return (basis, None) if side == "left" else (None, basis)
    left, right = basis
    return left, right
