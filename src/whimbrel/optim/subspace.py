"""Where a gradient is worth keeping: a basis Q (n x r) of the rows of G (m x n), so that R = G Q stands for G.

Every function takes stacks of matrices as well, never raises for what a gradient holds, and waits for no device:
failure is a tensor of truth values, one for each matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.optim.shards import Shard, add_up, draw

__all__ = [
    "Basis",
    "cholesky_qr",
    "cold_basis",
    "drop_rounding_",
    "polar_factor",
    "random_basis",
    "svd_basis",
    "warm_basis",
]

QUINTIC = (15 / 8, -10 / 8, 3 / 8)
"""x (15 - 10 x^2 + 3 x^4) / 8 brings singular values up to 1 nearer to it, and cubes what the near ones lack."""
ROUGH, FINE = 6, 2
"""Newton-Schulz steps; each corrects the errors of those before it, so that the last alone must be exact."""
FLOOR = 1e-5
"""Of the mean length of a column: how much of the old basis stays in the new, so that it never loses a direction."""


class Basis(NamedTuple):
    """A new basis (..., n, r); how much of the old one it holds, 0 to 1, NaN for none; whether it could be found."""

    basis: Tensor
    overlap: Tensor
    found: Tensor


def svd_basis(grad: Tensor, rank: int) -> Tensor:
    """The first right singular vectors: no basis keeps more of `grad`, and none takes longer to find."""
    _, _, vh = torch.linalg.svd(grad.float().nan_to_num(), full_matrices=False)
    basis: Tensor = vh[..., :rank, :].mT.contiguous()
    return basis


def random_basis(
    shape: torch.Size, rank: int, generator: torch.Generator, device: torch.device, shard: Shard | None = None
) -> Tensor:
    """Gaussian with variance 1/r (..., n, r): keeps lengths on average, whatever the gradient (APOLLO)."""
    size = (*shape[:-2], shape[-1], rank)
    basis: Tensor = draw(size, generator, device, shard if len(shape) > 2 else None) * rank**-0.5
    return basis


def cold_basis(grad: Tensor, rank: int, generator: torch.Generator, shard: Shard | None = None) -> Basis:
    """A basis from nothing but `grad`: Q = orth(G^T Omega), then one power step; by chance where that has no span.

    Its columns are turned to the singular vectors of G Q, the first to the first: Adam's second moments then belong to
    the directions along which the gradient varies, which is worth more than the span alone.
    """
    grad = grad.float()
    sketch = draw((*grad.shape[:-1], rank), generator, grad.device, shard)
    size = (*grad.shape[:-2], grad.shape[-1], rank)
    filler = draw(size, generator, grad.device, shard if grad.ndim > 2 else None)
    y = _scaled(add_up(grad.mT @ sketch, shard))
    first, _ = cholesky_qr(y + filler * (FLOOR / grad.shape[-1] ** 0.5))
    y = _scaled(add_up(grad.mT @ (grad @ first), shard))
    basis, found = cholesky_qr(y + first * FLOOR)
    with _precision("highest"):
        low = grad @ basis
        gram = add_up(low.mT @ low, shard)
        basis = basis @ torch.linalg.eigh(gram.nan_to_num_()).eigenvectors.flip(-1)
    basis = torch.where(found[..., None, None], basis, cholesky_qr(filler)[0])
    return Basis(basis, torch.zeros(found.shape, device=grad.device), found)


def warm_basis(grad: Tensor, low: Tensor, old: Tensor, *, align: bool = True, shard: Shard | None = None) -> Basis:
    """One power step from the old basis: Y = G^T R, orthonormalised; `low` is R = G Q.

    With `align` it is turned to lie as near the old one as the new span allows, so that moments can stay as they are:
    Q = Y U with U the polar factor of Y^T Q_old (orthogonal Procrustes). Without, its columns go on to the singular
    vectors, the first to the first, and moments must be transported.
    """
    grad = grad.float() if grad.dtype == torch.float16 else grad  # which has no room for products of gradients
    y = _scaled(add_up((grad.mT @ low.to(grad.dtype)).float(), shard))
    basis, found = cholesky_qr(y + old * FLOOR)
    with _precision("highest"):
        shared = basis.mT @ old
        overlap = shared.square().sum(dim=(-2, -1)) / old.shape[-1]
        if align:
            turn, turned = cholesky_qr(polar_factor(shared), shifts=(0.0,))
            basis, found = basis @ turn, found & turned
    found = found & overlap.isfinite()
    return Basis(torch.where(found[..., None, None], basis, old), torch.where(found, overlap, torch.nan), found)


def drop_rounding_(low: Tensor, width: int) -> Tensor:
    """Set the columns of `low` (m x r) to zero that are rounding errors of a product over `width` numbers, in place.

    A gradient of a lower rank than the basis has nothing along some of its columns. What the product yields there is
    about sqrt(width) / 3 times the machine epsilon, relative to the longest column, and a rule that normalizes would
    blow it up to a full update. A column counts as absent below 2 sqrt(m + width) epsilon (fp64: 8): far below the
    usual tolerance of a numerical rank, max(m, width) epsilon, so that a gradient of full rank keeps its columns.
    """
    # An fp32 basis is decomposed in fp64 and rounded once. One of fp64 carries the errors of its own decomposition.
    factor = 2 if low.dtype == torch.float32 else 8
    tolerance = factor * torch.finfo(low.dtype).eps * (low.shape[-2] + width) ** 0.5
    norms = torch.linalg.vector_norm(low, dim=-2, keepdim=True)
    return low.mul_(norms > norms.amax(dim=-1, keepdim=True).mul_(tolerance))


def cholesky_qr(y: Tensor, shifts: tuple[float, ...] = (1e-6, 0.0, 0.0)) -> tuple[Tensor, Tensor]:
    """Orthonormal columns with the span of those of `y` (fp32), and whether that worked.

    Shifted CholeskyQR, a pass for each shift: C = Y^T Y;  L L^T = C + shift |C| I;  Y <- Y L^-T. The shift goes by the
    length of C, as its rounding errors do: where one direction outweighs all others, that is far above its diagonal.
    """
    with _precision("highest"):
        y = _scaled(y)
        found = torch.ones(y.shape[:-2], dtype=torch.bool, device=y.device)
        for shift in shifts:
            gram = y.mT @ y
            if shift:
                length = torch.linalg.matrix_norm(gram)
                gram.diagonal(dim1=-2, dim2=-1).add_(shift * length[..., None])
            factor, info = torch.linalg.cholesky_ex(gram)
            found &= info == 0
            y = torch.linalg.solve_triangular(factor.mT, y, upper=True, left=False)
        found &= y.isfinite().all(dim=-1).all(dim=-1)
    return y, found


def polar_factor(square: Tensor) -> Tensor:
    """The orthogonal matrix nearest to one of singular values up to 1, by products alone; exact for those from 0.05."""
    x, (a, b, c) = square, QUINTIC
    for precision in ("high",) * ROUGH + ("highest",) * FINE:
        with _precision(precision):
            gram = x.mT @ x
            inner = b * gram + c * (gram @ gram)
            inner.diagonal(dim1=-2, dim2=-1).add_(a)
            x = x @ inner
    return x


def _scaled(y: Tensor) -> Tensor:
    """`y` with columns of length 1 in the root mean square; by its largest number first, whose square may not fit."""
    y = y / y.abs().amax(dim=(-2, -1), keepdim=True)
    scaled: Tensor = y * (y.shape[-1] ** 0.5 / torch.linalg.matrix_norm(y, keepdim=True))
    return scaled


@contextlib.contextmanager
def _precision(precision: str) -> Iterator[None]:
    """The precision of fp32 products, whatever it is elsewhere: a Gram matrix squares every error."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
