"""Bases: orthonormal, aligned, close to the SVD, and failures that do not raise."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.unit.optim.optimizer_cases import random
from torch import Tensor

from whimbrel.optim.param_state import state_codec
from whimbrel.optim.subspace import cholesky_qr, cold_basis, polar_factor, random_basis, svd_basis, warm_basis


def decaying(rows: int, columns: int, seed: int = 0, rate: float = 0.8) -> Tensor:
    """A matrix whose singular values are 1, rate, rate^2, ..."""
    size = min(rows, columns)
    u, v = (torch.linalg.qr(random((n, size), seed + i).double())[0] for i, n in enumerate((rows, columns)))
    return ((u * rate ** torch.arange(size)) @ v.mT).float()


def orthonormal(basis: Tensor, tolerance: float = 2e-6) -> bool:
    return bool((basis.mT @ basis - torch.eye(basis.shape[-1])).abs().max() < tolerance)


def energy(grad: Tensor, basis: Tensor) -> float:
    """Fraction of the gradient's energy in the span of a basis."""
    return float((grad @ basis).square().sum() / grad.square().sum())


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e5])
def test_cholesky_qr_is_orthonormal_for_ill_conditioned_matrices(condition: float) -> None:
    y = decaying(200, 16, rate=condition ** (-1 / 15)) * 1e-4
    q, found = cholesky_qr(y)
    assert bool(found)
    assert orthonormal(q)
    exact = torch.linalg.qr(y.double())[0]
    outside = q.double() - exact @ (exact.mT @ q.double())
    assert outside.norm(dim=0).max() < 1e-6 * condition


def test_cholesky_qr_reports_collinear_columns() -> None:
    """Failures are reported per matrix, not raised."""
    good, zero, bad = random((30, 4)), torch.zeros(30, 4), random((30, 4))
    bad[3, 1] = math.nan
    _, found = cholesky_qr(torch.stack((good, zero, bad)))
    assert found.tolist() == [True, False, False]


@pytest.mark.parametrize("spread", [1.0, 0.2, 0.05])
def test_polar_factor_matches_the_svd(spread: float) -> None:
    square = decaying(24, 24, rate=spread ** (1 / 23))
    u, _, vh = torch.linalg.svd(square.double())
    assert (polar_factor(square) - u @ vh).abs().max() < 1e-5


@pytest.mark.parametrize("longest", [0.3, 1.0, 1.2])
def test_polar_factor_is_scale_invariant(longest: float) -> None:
    """A 4-bit basis has singular values above 1."""
    square = decaying(24, 24, rate=0.9)
    torch.testing.assert_close(polar_factor(square * longest), polar_factor(square), atol=1e-5, rtol=1e-5)


def procrustes(grad: Tensor, old: Tensor) -> Tensor:
    """The equations of the warm refresh, with SVDs in fp64: Y = orth(G^T G Q);  Q = Y U V^T, U S V^T = Y^T Q_old."""
    grad, old = grad.double(), old.double()
    y = torch.linalg.qr(grad.mT @ (grad @ old))[0]
    u, _, vh = torch.linalg.svd(y.mT @ old)
    return y @ (u @ vh)


@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (3, 20, 16)])
def test_warm_basis_matches_the_equations(shape: tuple[int, ...]) -> None:
    grad = random(shape)
    old = torch.linalg.qr(random((*shape[:-2], shape[-1], 6), 1))[0]
    fresh = warm_basis(grad, grad @ old, old)
    exact = procrustes(grad, old)
    assert fresh.valid.all()
    assert (fresh.basis.double() - exact).abs().max() < 2e-4
    overlap = (exact.mT @ old.double()).square().sum(dim=(-2, -1)) / 6
    torch.testing.assert_close(fresh.overlap.double(), overlap, atol=1e-4, rtol=1e-4)


def test_aligned_basis_is_the_closest_to_the_old_one() -> None:
    grad, old = random((50, 30)), torch.linalg.qr(random((30, 5), 1))[0]
    basis = warm_basis(grad, grad @ old, old).basis
    near = (basis - old).norm()
    for seed in range(20):
        turn = torch.linalg.qr(random((5, 5), seed))[0]
        assert (basis @ turn - old).norm() > near


def test_overlap_is_one_for_a_stable_and_zero_for_an_orthogonal_basis() -> None:
    old = torch.eye(20)[:, :4]
    kept = torch.eye(20)[:4] * torch.tensor([4.0, 3.0, 2.0, 1.0])[:, None]
    assert abs(float(warm_basis(kept, kept @ old, old).overlap) - 1) < 1e-5
    mixed = kept + 1e4 * torch.eye(20)[:4].roll(10, dims=1)
    assert float(warm_basis(mixed, mixed @ old, old).overlap) < 1e-3


GRADIENTS: dict[str, Callable[[], Tensor]] = {
    "zero": lambda: torch.zeros(24, 16),
    "not a number": lambda: torch.full((24, 16), math.nan),
    "infinite": lambda: torch.full((24, 16), math.inf),
    "one number": lambda: torch.zeros(24, 16).index_put_((torch.tensor([3]), torch.tensor([5])), torch.tensor(1.0)),
    "of rank 1": lambda: random((24, 1)) @ random((1, 16), 1),
    "of rank 3": lambda: random((24, 3)) @ random((3, 16), 1),
    "tiny": lambda: random((24, 16)) * 1e-8,
    "vast": lambda: random((24, 16)) * 1e8,
    "in bf16": lambda: random((24, 16), dtype=torch.bfloat16),
    "small in fp16": lambda: (random((24, 16)) * 1e-5).half(),
}
LOST = ("zero", "not a number", "infinite")
"""Gradients without a basis."""


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_no_gradient_raises_or_breaks_a_basis(kind: str, rank: int) -> None:
    grad = GRADIENTS[kind]()
    old = torch.linalg.qr(random((16, rank), 1))[0]
    warm = warm_basis(grad, grad @ old.to(grad.dtype), old)
    assert bool(warm.valid) == (kind not in LOST)
    assert orthonormal(warm.basis)
    if kind in LOST:
        assert torch.equal(warm.basis, old)
    cold = cold_basis(grad, rank, generator())
    assert bool(cold.valid) == (kind not in LOST)
    assert orthonormal(cold.basis)


@pytest.mark.parametrize(("directions", "ratio"), [(1, 300.0), (8, 100.0), (1, 1e5)])
def test_basis_is_found_if_few_directions_dominate(directions: int, ratio: float) -> None:
    m, n, rank = 768, 512, 256
    left, right = (torch.randn(*shape, generator=generator()) for shape in ((m, n), (n, n)))
    left[:, :directions] *= ratio
    grad, old = left @ right, torch.linalg.qr(torch.randn(n, rank, generator=generator()))[0]
    for fresh in (cold_basis(grad, rank, generator()), warm_basis(grad, grad @ old, old)):
        assert bool(fresh.valid)
        assert orthonormal(fresh.basis, 1e-5)
        assert energy(grad, fresh.basis) > 0.95 * energy(grad, svd_basis(grad, directions))


def test_stacks_equal_single_matrices() -> None:
    grads, old = random((5, 24, 16)), torch.linalg.qr(random((5, 16, 4), 1))[0]
    grads[2] = 0
    together = warm_basis(grads, grads @ old, old)
    for i in range(5):
        alone = warm_basis(grads[i], grads[i] @ old[i], old[i])
        torch.testing.assert_close(together.basis[i], alone.basis, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(together.overlap[i], alone.overlap, atol=1e-5, rtol=1e-4, equal_nan=True)
        assert together.valid[i] == alone.valid


def test_cold_basis_captures_nearly_as_much_energy_as_the_svd() -> None:
    grad = decaying(120, 80, rate=0.9)
    best = energy(grad, svd_basis(grad, 12))
    assert energy(grad, cold_basis(grad, 12, generator()).basis) > 0.95 * best


def test_warm_steps_converge_to_the_svd_basis() -> None:
    """From a random basis, while the gradient drifts a little in every step."""
    grad = decaying(120, 80, rate=0.85)
    basis = torch.linalg.qr(random((80, 12), 9))[0]
    for step in range(5):
        seen = grad + random((120, 80), step) * 1e-3
        basis = warm_basis(seen, seen @ basis, basis).basis
    assert energy(grad, basis) > 0.99 * energy(grad, svd_basis(grad, 12))


@pytest.mark.parametrize("store", ["fp32", "bf16", "int8", "int4"])
def test_warm_steps_work_from_a_low_bit_basis(store: str) -> None:
    """The captured energy is close to that of an fp32 basis."""
    grad = decaying(256, 128, rate=0.95)
    own = state_codec(store, "basis")
    buffers = own.allocate((128, 32), torch.device("cpu"))
    own.encode_(buffers, torch.linalg.qr(random((128, 32)))[0])
    for _ in range(4):
        old = own.decode(buffers, 32)
        fresh = warm_basis(grad, grad @ old, old)
        assert bool(fresh.valid)
        own.encode_(buffers, fresh.basis)
    assert energy(grad, fresh.basis) > 0.98 * energy(grad, svd_basis(grad, 32))
    assert float(fresh.overlap) > 0.9


def test_svd_basis_is_optimal_and_owns_its_memory() -> None:
    grad = random((3, 20, 14))
    basis = svd_basis(grad, 5)
    s = torch.linalg.svdvals(grad)
    torch.testing.assert_close((grad @ basis).square().sum((-2, -1)), s[:, :5].square().sum(-1), atol=1e-3, rtol=1e-5)
    assert basis.untyped_storage().nbytes() == basis.nbytes


def test_random_basis_preserves_norms_on_average() -> None:
    rows = random((50, 64))
    bases = [
        random_basis(torch.Size((50, 64)), 8, torch.Generator().manual_seed(i), torch.device("cpu")) for i in range(200)
    ]
    kept = torch.stack([(rows @ basis).square().sum(-1) for basis in bases]).mean(0) / rows.square().sum(-1)
    assert abs(float(kept.mean()) - 1) < 0.02
    again = random_basis(torch.Size((50, 64)), 8, torch.Generator().manual_seed(3), torch.device("cpu"))
    assert torch.equal(again, bases[3])


def test_matmul_precision_setting_is_restored() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        cholesky_qr(random((20, 4)))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("shape", [(40, 30), (3, 24, 30)])
def test_cold_basis_columns_are_singular_vectors_largest_first(shape: tuple[int, ...]) -> None:
    """Columns of G Q are orthogonal with decreasing norms."""
    grad = random(shape)
    low = grad @ cold_basis(grad, 8, generator()).basis
    gram = low.mT @ low
    lengths = gram.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(gram, torch.diag_embed(lengths), atol=1e-3 * float(lengths.max()), rtol=0)
    assert bool((lengths[..., :-1] >= lengths[..., 1:]).all())
