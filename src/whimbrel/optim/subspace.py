"""Low-rank subspaces of gradients: a basis Q (n x r), the projection R = G Q, and the back projection to W (m x n).

Every function accepts stacks of matrices, never raises because of the values of a gradient, and does not synchronize
with the device: failures are reported as a boolean tensor with one element per matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.distributed.sharded_rows import Ranks, RowSharding, grad_times, grad_transposed_times, randn, sum_rows

__all__ = [
    "BACK_PROJECTIONS",
    "Basis",
    "FullUpdate",
    "add_matmul_",
    "back_project",
    "cholesky_qr",
    "cold_basis",
    "polar_factor",
    "random_basis",
    "singular_vectors",
    "svd_basis",
    "warm_basis",
    "zero_rounding_errors_",
]

QUINTIC = (15 / 8, -10 / 8, 3 / 8)
"""x (15 - 10 x^2 + 3 x^4) / 8 moves singular values in (0, 1] towards 1, and cubes the error of those near it."""
ROUGH_STEPS, EXACT_STEPS = 6, 2
"""Newton-Schulz iterations; each corrects the errors of those before it, so only the last ones need full precision."""
OLD_BASIS_WEIGHT = 1e-5
"""How much of the old basis is added to the new columns, relative to their norm, so that no direction is lost."""
BACK_PROJECTIONS = ("galore", "fira", "apollo", "apollo_mini")
MAX_GROWTH = 1.01
"""Maximum growth of the norm of the scaled gradient from one step to the next (Fira, APOLLO)."""
TINY = 1e-30


class Basis(NamedTuple):
    """A new basis (..., n, r); its overlap with the old one (0 to 1, NaN if invalid); whether it is valid."""

    basis: Tensor
    overlap: Tensor
    valid: Tensor


def singular_vectors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The first `rank` columns of U and rows of V^T; non-finite elements are replaced by 0 for the SVD."""
    u, _, vh = torch.linalg.svd(matrix.nan_to_num(0.0, 0.0, 0.0), full_matrices=False)
    return u[..., :rank], vh[..., :rank, :]


def svd_basis(grad: Tensor, rank: int) -> Tensor:
    """The first right singular vectors: the basis that captures most of `grad`, and the slowest to compute."""
    return singular_vectors(grad.float(), rank)[1].mT.contiguous()


def random_basis(
    shape: torch.Size, rank: int, generator: torch.Generator, device: torch.device, shard: RowSharding | None = None
) -> Tensor:
    """Gaussian with variance 1/r (..., n, r), which preserves norms on average (APOLLO)."""
    size = (*shape[:-2], shape[-1], rank)
    basis: Tensor = randn(size, generator, device, shard if len(shape) > 2 else None) * rank**-0.5
    return basis


def cold_basis(grad: Tensor, rank: int, generator: torch.Generator, ranks: Ranks = None) -> Basis:
    """A first basis: a randomized range finder with one power iteration; random where the gradient is zero.

    Q = orth(G^T Omega) with a Gaussian Omega, then Q <- orth(G^T G Q). Finally the columns are rotated to the singular
    vectors of G Q, largest first: Adam's second moments then belong to the directions along which the gradient varies,
    which matters more for the loss than the span itself.
    """
    grad = grad.float()
    sketch = randn((*grad.shape[:-1], rank), generator, grad.device, ranks)
    size = (*grad.shape[:-2], grad.shape[-1], rank)
    noise = randn(size, generator, grad.device, ranks if grad.ndim > 2 else None)
    y = _normalized(grad_transposed_times(grad, sketch, ranks))
    first, _ = cholesky_qr(y + noise * (OLD_BASIS_WEIGHT / grad.shape[-1] ** 0.5))
    y = _normalized(grad_transposed_times(grad, grad_times(grad, first, ranks), ranks))
    basis, valid = cholesky_qr(y + first * OLD_BASIS_WEIGHT)
    with _matmul_precision("highest"):
        low_rank_grad = grad_times(grad, basis, ranks)
        gram = sum_rows(low_rank_grad.mT @ low_rank_grad, ranks)
        basis = basis @ torch.linalg.eigh(gram.nan_to_num_()).eigenvectors.flip(-1)
    basis = torch.where(valid[..., None, None], basis, cholesky_qr(noise)[0])
    return Basis(basis, torch.zeros(valid.shape, device=grad.device), valid)


def warm_basis(grad: Tensor, low_rank_grad: Tensor, old: Tensor, *, align: bool = True, ranks: Ranks = None) -> Basis:
    """The next basis by one power iteration from the old one: Q = orth(G^T R), where `low_rank_grad` is R = G Q_old.

    This needs no SVD: two matmuls and a CholeskyQR. Repeated, its columns converge to the singular vectors of
    the gradients, largest first, so moments have to be transferred to the new basis. With `align` the columns are
    rotated instead to lie as close to the old ones as the new span allows, Q U with U the polar factor of Q^T Q_old
    (orthogonal Procrustes), and moments can stay as they are.
    """
    grad = grad.float() if grad.dtype == torch.float16 else grad  # products of gradients exceed the range of fp16
    y = _normalized(grad_transposed_times(grad, low_rank_grad.to(grad.dtype), ranks))
    basis, valid = cholesky_qr(y + old * OLD_BASIS_WEIGHT)
    with _matmul_precision("highest"):
        cross_gram = basis.mT @ old
        overlap = cross_gram.square().sum(dim=(-2, -1)) / old.shape[-1]
        if align:
            rotation, orthogonal = cholesky_qr(polar_factor(cross_gram), shifts=(0.0,))
            basis, valid = basis @ rotation, valid & orthogonal
    valid = valid & overlap.isfinite()
    return Basis(torch.where(valid[..., None, None], basis, old), torch.where(valid, overlap, torch.nan), valid)


def zero_rounding_errors_(low_rank_grad: Tensor, width: int) -> Tensor:
    """Set columns of `low_rank_grad` (m x r) that are only rounding errors to zero, in place.

    `width` is the inner dimension of the matmul that computed it.

    If the rank of a gradient is lower than that of the basis, some columns of R should be zero. The computed ones are
    about sqrt(width) / 3 times the machine epsilon, relative to the largest column, and a normalizing rule such as
    Adam would scale them up to a full update. A column is set to zero below 2 sqrt(m + width) epsilon (fp64: 8): far
    below the usual tolerance of a numerical rank, max(m, width) epsilon, so that a gradient of full rank keeps its
    columns.
    """
    # A basis for fp32 is decomposed in fp64 and rounded once; a basis for fp64 keeps the error of the decomposition.
    factor = 2 if low_rank_grad.dtype == torch.float32 else 8
    tolerance = factor * torch.finfo(low_rank_grad.dtype).eps * (low_rank_grad.shape[-2] + width) ** 0.5
    norms = torch.linalg.vector_norm(low_rank_grad, dim=-2, keepdim=True)
    return low_rank_grad.mul_(norms > norms.amax(dim=-1, keepdim=True).mul_(tolerance))


def cholesky_qr(y: Tensor, shifts: tuple[float, ...] = (1e-6, 0.0, 0.0)) -> tuple[Tensor, Tensor]:
    """Orthonormal columns with the span of those of `y` (fp32), and whether that succeeded.

    Shifted CholeskyQR, one pass per shift: C = Y^T Y;  L L^T = C + shift |C| I;  Y <- Y L^-T. Mostly matmuls,
    and so much faster on a GPU than Householder QR; the shift makes the first factorization safe, the further passes
    restore orthogonality. The shift is relative to the norm of C, as its rounding errors are: if one direction
    dominates, that is far above its mean diagonal.
    """
    with _matmul_precision("highest"):
        y = _normalized(y)
        valid = torch.ones(y.shape[:-2], dtype=torch.bool, device=y.device)
        for shift in shifts:
            gram = y.mT @ y
            if shift:
                norm = torch.linalg.matrix_norm(gram)
                gram.diagonal(dim1=-2, dim2=-1).add_(shift * norm[..., None])
            factor, info = torch.linalg.cholesky_ex(gram)
            valid &= info == 0
            y = torch.linalg.solve_triangular(factor.mT, y, upper=True, left=False)
        valid &= y.isfinite().all(dim=-1).all(dim=-1)
    return y, valid


def polar_factor(matrix: Tensor) -> Tensor:
    """The orthogonal matrix nearest to a square one, by Newton-Schulz; needs singular values between 0.05 and 1."""
    x, (a, b, c) = matrix, QUINTIC
    for precision in ("high",) * ROUGH_STEPS + ("highest",) * EXACT_STEPS:
        with _matmul_precision(precision):
            gram = x.mT @ x
            inner = b * gram + c * (gram @ gram)
            inner.diagonal(dim1=-2, dim2=-1).add_(a)
            x = x @ inner
    return x


class FullUpdate(NamedTuple):
    """A (m x r) and c (m x 1) of an update D = A Q^T + c * G; None for zero."""

    low_rank: Tensor | None
    factor: Tensor | None


def back_project(
    kind: str,
    direction: Tensor,
    low_rank_grad: Tensor,
    grad: Tensor,
    prev_norm: Tensor,
    shard: RowSharding | None = None,
) -> FullUpdate:
    """Turn the direction N that a rule computed for R = G Q into an update of the weight.

    Every kind has the form D = A Q^T + c * G with at most one factor c per row, so D is never materialized:
    rows can be computed and applied a few at a time. With norms over rows i:
        galore         A = N                                     (handled by the caller)
        fira           A = N - c R,  c_i = |N_i| / |R_i|         (Chen et al., 2024: also the residual G - R Q^T)
        apollo         A = 0,        c_i = |N_i| / |R_i|         (Zhu et al., 2024)
        apollo_mini    A = 0,        c   = |N| / |R|
    `prev_norm` is the norm of c * G (of the residual for fira) in the previous step, 0 at first; updated in place.
    Fira and APOLLO limit its growth per step.
    """

    def norm(tensor: Tensor) -> Tensor:
        if kind == "apollo_mini":
            return sum_rows(tensor.square().sum(dim=(-2, -1), keepdim=True), shard).sqrt()
        return tensor.square().sum(dim=-1, keepdim=True).sqrt()

    factor = norm(direction) / norm(low_rank_grad).clamp(min=TINY)
    squares = grad.float().square().sum(dim=-1, keepdim=True)
    if kind == "fira":  # Q has orthonormal columns, so |G - R Q^T|^2 = |G|^2 - |R|^2
        squares = (squares - low_rank_grad.square().sum(dim=-1, keepdim=True)).clamp(min=0)
    scaled = sum_rows((factor.square() * squares).sum(dim=-2, keepdim=True), shard).sqrt()
    limit = MAX_GROWTH * prev_norm.view_as(scaled)
    shrink = torch.where((limit > 0) & (scaled > limit), limit / scaled.clamp(min=TINY), 1.0)
    prev_norm.copy_((scaled * shrink).view_as(prev_norm))
    factor = factor * shrink
    return FullUpdate(
        direction - factor * low_rank_grad if kind == "fira" else None, factor.expand(*low_rank_grad.shape[:-1], 1)
    )


def add_matmul_(total: Tensor, left: Tensor, right: Tensor | None, *, alpha: float, beta: float = 1.0) -> None:
    """`total = beta * total + alpha * left @ right`, without a temporary of that size; `right=None` is the identity."""
    if right is None:
        (total if beta == 1.0 else total.mul_(beta)).add_(left, alpha=alpha)
    elif total.ndim == 2:
        total.addmm_(left, right, beta=beta, alpha=alpha)
    elif total.ndim == 3:
        total.baddbmm_(left, right, beta=beta, alpha=alpha)
    else:  # the memory of a convolution in channels_last is not laid out as a matrix
        total.mul_(beta).add_((left @ right).view(total.shape), alpha=alpha)


def _normalized(y: Tensor) -> Tensor:
    """`y` with a root mean square column norm of 1; divided by its maximum first, since squares may overflow."""
    y = y / y.abs().amax(dim=(-2, -1), keepdim=True)
    scaled: Tensor = y * (y.shape[-1] ** 0.5 / torch.linalg.matrix_norm(y, keepdim=True))
    return scaled


@contextlib.contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of fp32 matmuls (TF32 or not): a Gram matrix squares every error."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
