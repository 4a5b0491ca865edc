"""Invariants of every low-rank optimizer: gradients of lower rank than the subspace."""

from __future__ import annotations

import pytest
import torch
from tests.unit.optim.optimizer_cases import (
    CASES,
    LOW_RANK,
    random,
)
from torch import nn

from whimbrel.optim import GaLore, project_in_backward
from whimbrel.optim.galore import PROJECTION_TYPES, side_of
from whimbrel.optim.subspace import zero_rounding_errors_


def has_exact_span(name: str) -> bool:
    """False for random bases and for low-bit ones, which are only roughly orthonormal."""
    settings = LOW_RANK[name]([nn.Parameter(random((8, 6)))]).defaults
    random_span = settings["subspace"] == "random" and settings["back_projection"] == "galore"
    return settings["rank"] is not None and settings["basis_store"] == "fp32" and not random_span


EXACT_SPAN = [name for name in LOW_RANK if has_exact_span(name)]


@pytest.mark.parametrize("name", EXACT_SPAN)
@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("rows", [96, 32])
def test_update_stays_in_the_row_space_of_a_low_rank_gradient(name: str, size: float, rows: int) -> None:
    """Gradients of rank 2, a subspace of rank 12: 10 directions have only rounding errors."""
    p = nn.Parameter(torch.zeros(rows, 64))
    optimizer = CASES[name]([p], rank=12)
    left = optimizer.layout_of(p).transposed
    fixed = random((2, rows if left else 64), 99)
    for step in range(12):
        left_factor = random((64 if left else rows, 2), step)
        p.grad = (left_factor @ fixed).mT.contiguous() * size if left else left_factor @ fixed * size
        optimizer.step()
    space = torch.linalg.qr(fixed.double().mT).Q
    update = (p.detach().mT if left else p.detach()).double()
    assert update.abs().max() > 0
    assert (update - update @ space @ space.mT).norm() < 1e-3 * update.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("projection", PROJECTION_TYPES)
@pytest.mark.parametrize("shape", [(96, 64), (32, 64), (2, 32, 64)])
def test_update_of_galore_stays_in_the_spaces_of_a_low_rank_gradient(
    shape: tuple[int, ...], projection: str, dtype: torch.dtype
) -> None:
    """Row and column space are fixed: the update must stay in the one that is projected."""
    *stack, rows, columns = shape
    p = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = GaLore([p], lr=0.02, rank=12, update_proj_gap=5, projection_type=projection)
    left, right = random((*stack, rows, 2), 98, dtype), random((*stack, 2, columns), 99, dtype)
    size = 1e3 if dtype == torch.float32 else 1e12  # so that rounding errors are above eps
    for step in range(12):
        p.grad = left @ random((*stack, 2, 2), step, dtype) @ right * size
        optimizer.step()
    update = p.detach().double()
    u, v = torch.linalg.qr(left.double()).Q, torch.linalg.qr(right.double().mT).Q
    outside_rows, outside_columns = (update - update @ v @ v.mT).norm(), (update - u @ u.mT @ update).norm()
    expected = {"right": outside_rows, "left": outside_columns, "full": max(outside_rows, outside_columns)}
    assert expected[side_of(projection, shape)] < 1e-3 * update.norm()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_projected_update_stays_in_the_row_space_of_a_low_rank_gradient(accumulation: int) -> None:
    p = nn.Parameter(torch.zeros(96, 64))
    optimizer = project_in_backward(LOW_RANK["galore_warm"]([p], rank=12), accumulation=accumulation)
    fixed = random((2, 64), 99)
    for step in range(12 * accumulation):
        (p * (random((96, 2), step) @ fixed)).sum().backward()
        if step % accumulation == accumulation - 1:
            optimizer.step()
            optimizer.zero_grad()
    space, update = torch.linalg.qr(fixed.double().mT).Q, p.detach().double()
    assert (update - update @ space @ space.mT).norm() < 1e-3 * update.norm()


def test_only_columns_of_rounding_errors_are_zeroed() -> None:
    """Columns over four orders of magnitude are unchanged; those below the resolution of the product are zeroed."""
    low = random((2, 96, 12)) * torch.logspace(0, -4, 12)
    assert torch.equal(zero_rounding_errors_(low.clone(), 64), low)
    low[1, :, 3] *= 1e-7
    dropped = zero_rounding_errors_(low.clone(), 64)
    assert not dropped[1, :, 3].any()
    dropped[1, :, 3] = low[1, :, 3]
    assert torch.equal(dropped, low)
