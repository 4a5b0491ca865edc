"""Orthogonalization by matrix products against the SVD."""

from __future__ import annotations

import pytest
import torch

from whimbrel.ops import orthogonalize
from whimbrel.ops.orthogonalize import orthogonalize_reference


@pytest.mark.parametrize("shape", [(64, 64), (128, 32), (32, 128), (3, 48, 16)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_singular_values_approach_one_and_singular_vectors_stay(shape: tuple[int, ...], scale: float) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale
    factors = orthogonalize(matrices)
    values = torch.linalg.svdvals(factors)
    assert values.min() > 0.8
    assert values.max() < 1.2
    reference = orthogonalize_reference(matrices)
    assert (factors - reference).norm() / reference.norm() < 0.15


def test_a_zero_matrix_stays_zero() -> None:
    assert orthogonalize(torch.zeros(8, 8)).abs().max() == 0


def test_the_matrices_of_a_stack_are_independent() -> None:
    stack = torch.randn(4, 24, 40, generator=torch.Generator().manual_seed(2))
    alone = torch.stack([orthogonalize(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack), alone, atol=1e-5, rtol=1e-5)
