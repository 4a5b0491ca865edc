"""GaLoreProjector against the SVD."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from whimbrel.base.errors import OptimizerError
from whimbrel.optim import GaLoreProjector

TYPES = ["std", "reverse_std", "right", "left", "full"]
SHAPES = {"tall": (20, 8), "wide": (8, 20), "square": (12, 12), "stack": (3, 10, 6), "row": (1, 9), "column": (9, 1)}


def gradient(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Singular values that fall by a factor, so that the best approximation of each rank is well defined."""
    generator = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False)
    return (u * 0.8 ** torch.arange(u.shape[-1]) @ vh).to(dtype)


def best(grad: Tensor, rank: int) -> Tensor:
    u, s, vh = torch.linalg.svd(grad.double(), full_matrices=False)
    return u[..., :rank] * s[..., None, :rank] @ vh[..., :rank, :]


@pytest.mark.parametrize(
    ("dtype", "bar"),
    [(torch.float64, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("projection_type", TYPES)
def test_project_and_back_is_the_best_approximation(
    projection_type: str, shape: tuple[int, ...], dtype: torch.dtype, bar: float
) -> None:
    grad = gradient(shape, dtype)
    for rank in (1, 3, 8, 50):
        projector = GaLoreProjector(rank=rank, scale=0.25, projection_type=projection_type)
        low = projector.project(grad, 0)
        back = projector.project_back(low)
        expected = 0.25 * best(grad, rank)
        assert back.dtype == low.dtype == dtype
        assert back.shape == grad.shape
        assert (back.double() - expected).norm() / expected.norm() <= bar


@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("shape", [(64, 48), (48, 64)], ids=["tall", "wide"])
@pytest.mark.parametrize("projection_type", TYPES)
def test_nearly_equal_singular_values_do_not_mix(projection_type: str, shape: tuple[int, int], gap: float) -> None:
    """fp32 distinguishes the values; singular vectors computed in fp32 would mix by about 1e-7 / gap."""
    generator = torch.Generator().manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False)
    s = torch.full((48,), 0.1, dtype=torch.float64)
    s[:8], s[8:20] = 1.0, 1.0 - gap
    grad = ((u * s) @ vh).float()
    projector = GaLoreProjector(rank=8, projection_type=projection_type)
    back, expected = projector.project_back(projector.project(grad, 0)), best(grad, 8)
    assert (back.double() - expected).norm() / expected.norm() <= 2e-5


@pytest.mark.parametrize(
    ("projection_type", "shape", "low", "basis"),
    [
        ("std", (20, 8), (20, 3), [(3, 8)]),
        ("std", (8, 20), (3, 20), [(8, 3)]),
        ("std", (8, 8), (8, 3), [(3, 8)]),
        ("reverse_std", (20, 8), (3, 8), [(20, 3)]),
        ("reverse_std", (8, 20), (8, 3), [(3, 20)]),
        ("reverse_std", (8, 8), (3, 8), [(8, 3)]),
        ("right", (8, 20), (8, 3), [(3, 20)]),
        ("left", (20, 8), (3, 8), [(20, 3)]),
        ("full", (20, 8), (3, 3), [(20, 3), (3, 8)]),
        ("full", (5, 20, 2), (5, 2, 2), [(5, 20, 2), (5, 2, 2)]),
    ],
)
def test_projection_type_determines_shapes(projection_type: str, shape: tuple, low: tuple, basis: list) -> None:
    projector = GaLoreProjector(rank=3, projection_type=projection_type)
    assert projector.ortho_matrix is None
    assert projector.project(gradient(shape), 0).shape == low
    parts = projector.ortho_matrix if projection_type == "full" else [projector.ortho_matrix]
    assert [part.shape for part in parts] == basis


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("projection_type", TYPES)
def test_named_projections_equal_project(projection_type: str, shape: tuple[int, ...]) -> None:
    grad = gradient(shape)
    one, other = (GaLoreProjector(rank=2, projection_type=projection_type) for _ in range(2))
    named = getattr(one, f"get_low_rank_grad_{projection_type}")
    assert torch.equal(named(grad, 0), other.project(grad, 0))
    assert torch.equal(named(2 * grad, 1), other.project(2 * grad, 1))


def test_basis_is_the_leading_singular_vectors() -> None:
    grad = gradient((7, 5))
    u, _, vh = torch.linalg.svd(grad, full_matrices=False)
    right = GaLoreProjector.get_orthogonal_matrix(grad, 2, "right")
    left = GaLoreProjector.get_orthogonal_matrix(grad, 2, "left")
    torch.testing.assert_close(right, vh[:2], rtol=0, atol=1e-12)
    torch.testing.assert_close(left, u[:, :2], rtol=0, atol=1e-12)
    both = GaLoreProjector.get_orthogonal_matrix(grad, 2, "full")
    assert torch.equal(both[0], left)
    assert torch.equal(both[1], right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [2, 5, 40])
def test_basis_owns_its_storage_and_has_the_dtype_of_the_gradient(dtype: torch.dtype, rank: int) -> None:
    """A view would keep all of U or of V^T alive."""
    for part in GaLoreProjector.get_orthogonal_matrix(gradient((30, 20), dtype), rank, "full"):
        assert part.dtype == dtype
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_fp64_is_decomposed_in_fp64() -> None:
    right = GaLoreProjector.get_orthogonal_matrix(gradient((30, 20)), 4, "right")
    assert (right @ right.mT - torch.eye(4, dtype=torch.float64)).abs().max() < 1e-13


@pytest.mark.parametrize("projection_type", TYPES)
def test_refreshes_without_a_basis_and_at_multiples_of_the_gap(projection_type: str) -> None:
    projector = GaLoreProjector(rank=2, update_proj_gap=3, projection_type=projection_type)
    refreshed, before = [], None
    for steps in range(1, 8):
        projector.project(gradient((9, 6), seed=steps), steps)
        refreshed.append(projector.ortho_matrix is not before)
        before = projector.ortho_matrix
    assert refreshed == [True, False, True, False, False, True, False]


def test_projects_with_the_old_basis_between_refreshes() -> None:
    projector = GaLoreProjector(rank=2, update_proj_gap=10, projection_type="right")
    projector.project(gradient((9, 6), seed=1), 0)
    other = gradient((9, 6), seed=2)
    basis = projector.ortho_matrix
    torch.testing.assert_close(projector.project_back(projector.project(other, 1)), other @ basis.mT @ basis)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("projection_type", TYPES)
def test_nonfinite_gradient_does_not_change_the_basis(projection_type: str, value: float) -> None:
    bad = gradient((9, 6), torch.float32)
    bad[2, 3] = value
    projector = GaLoreProjector(rank=2, update_proj_gap=1, projection_type=projection_type)
    projector.project(gradient((9, 6), torch.float32), 0)
    kept = projector.ortho_matrix
    assert not projector.project_back(projector.project(bad, 1)).isfinite().all()
    assert projector.ortho_matrix is kept

    fresh = GaLoreProjector(rank=2, projection_type=projection_type)
    fresh.project(bad, 0)
    parts = fresh.ortho_matrix if projection_type == "full" else [fresh.ortho_matrix]
    assert all(part.isfinite().all() for part in parts)


@pytest.mark.parametrize("projection_type", TYPES)
def test_zero_and_rank_deficient_gradients(projection_type: str) -> None:
    for grad in (torch.zeros(9, 6), torch.ones(9, 6), torch.outer(torch.arange(9.0), torch.arange(6.0))):
        projector = GaLoreProjector(rank=4, projection_type=projection_type)
        torch.testing.assert_close(projector.project_back(projector.project(grad, 0)), grad, atol=1e-4, rtol=1e-5)


def test_attributes_and_defaults() -> None:
    projector = GaLoreProjector()
    assert vars(projector) == {
        "rank": 128, "update_proj_gap": 50, "scale": 1.0, "projection_type": "std", "ortho_matrix": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"projection_type": "both"},
            "projection_type: expected one of std, reverse_std, right, left, full.* got 'both'",
        ),
        ({"rank": 0}, "rank: expected an integer >= 1, got 0"),
        ({"rank": 1.5}, "rank: expected an integer >= 1, got 1.5"),
        ({"update_proj_gap": 0}, "update_proj_gap: expected an integer >= 1, got 0"),
    ],
)
def test_invalid_arguments_are_rejected(settings: dict, message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        GaLoreProjector(**settings)


def test_vectors_and_missing_bases_are_rejected() -> None:
    with pytest.raises(OptimizerError, match="expected a tensor of two or more dimensions"):
        GaLoreProjector().project(torch.ones(3), 0)
    with pytest.raises(OptimizerError, match="call project\\(\\) first"):
        GaLoreProjector().project_back(torch.ones(3, 3))
    for projection_type in ("std", "reverse_std", "both"):
        with pytest.raises(ValueError, match="expected one of right, left, full"):
            GaLoreProjector.get_orthogonal_matrix(torch.ones(3, 3), 2, projection_type)
