"""Invariants of every optimizer: tensor options, and gradients of lower rank than the subspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.optim.optimizer_cases import (
    CASES,
    LOW_RANK,
    differences,
    parameters,
    params_of,
    random,
    run_steps,
    snapshot,
)
from torch import nn

from whimbrel.base.errors import OptimizerError
from whimbrel.optim import GaLore, Muon, Schedule, project_in_backward, step_in_backward
from whimbrel.optim.galore import PROJECTION_TYPES, side_of
from whimbrel.optim.subspace import zero_rounding_errors_

every = pytest.mark.parametrize("name", CASES)
NUMBERS = ("weight_decay", "eps", "scale", "momentum", "momentum_start", "betas", "rank", "gap", "update_proj_gap")


@every
@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_lr_equals_a_number_and_is_not_changed(name: str, shape: tuple[int, ...]) -> None:
    lr = torch.full(shape, CASES[name].lr)
    ours, expected = CASES[name](parameters(), lr=lr), CASES[name](parameters(), lr=lr.item())
    run_steps(ours, range(3))
    run_steps(expected, range(3))
    assert torch.equal(lr, torch.full(shape, CASES[name].lr))
    assert ours.param_groups[0]["lr"] is lr
    assert differences(snapshot(ours), snapshot(expected)) == []


@every
def test_step_uses_a_tensor_lr_filled_by_a_scheduler(name: str) -> None:
    """torch's schedulers and ours fill the tensor in place."""
    start = torch.tensor(CASES[name].lr).item()
    for schedule in (lambda o: torch.optim.lr_scheduler.LambdaLR(o, halve), lambda o: Schedule(o, halve)):
        lr = torch.tensor(start)
        ours, expected = CASES[name](parameters(), lr=lr), CASES[name](parameters(), lr=start)
        schedules = [schedule(optimizer) for optimizer in (ours, expected)]
        for step in range(3):
            for optimizer, moved in zip((ours, expected), schedules, strict=True):
                run_steps(optimizer, range(step, step + 1))
                moved.step()
        assert ours.param_groups[0]["lr"] is lr
        assert lr.item() == start / 8
        assert differences(snapshot(ours), snapshot(expected)) == []


def halve(step: int) -> float:
    return 0.5**step


@every
def test_tensor_lr_in_backward(name: str) -> None:
    lr = torch.tensor(CASES[name].lr)
    ours = step_in_backward(CASES[name]([nn.Parameter(random((24, 16)))], lr=lr))
    expected = step_in_backward(CASES[name]([nn.Parameter(random((24, 16)))], lr=lr.item()))
    for seed in range(3):
        for wrapper in (ours, expected):
            (p,) = params_of(wrapper)
            (p * random(p.shape, seed)).sum().backward()
            wrapper.step()
        lr.mul_(0.5)
        expected.param_groups[0]["lr"] = lr.item()
    assert differences(snapshot(ours), snapshot(expected)) == []


def test_tensor_lr_with_project_in_backward() -> None:
    lr = torch.tensor(0.02)
    optimizer = project_in_backward(LOW_RANK["galore_warm"]([nn.Parameter(random((24, 16)))], lr=lr, scale=0.25))
    (p,) = params_of(optimizer)
    for seed in range(3):
        (p * random(p.shape, seed)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert lr.item() == torch.tensor(0.02).item()


@every
def test_loaded_tensor_lr_is_a_copy(name: str) -> None:
    saved = CASES[name](parameters(), lr=torch.tensor(0.02))
    run_steps(saved, range(1))
    loaded = CASES[name](parameters())
    loaded.load_state_dict(saved.state_dict())
    saved.param_groups[0]["lr"].fill_(1.0)
    assert float(loaded.param_groups[0]["lr"]) == torch.tensor(0.02).item()


def tensor_settings() -> list[tuple[str, str]]:
    found = []
    for name, entry in CASES.items():
        known = entry([nn.Parameter(random((8, 6)))]).defaults
        found += [(name, key) for key in NUMBERS if key in known]
    return found


@pytest.mark.parametrize(("name", "key"), tensor_settings())
def test_other_tensor_options_are_rejected(name: str, key: str) -> None:
    value: Any = (0.9, torch.tensor(0.99)) if key == "betas" else torch.tensor(1)
    optimizer = CASES[name]([nn.Parameter(random((8, 6)))])
    with pytest.raises(OptimizerError, match=rf"^{key}: expected a Python number, got a tensor") as caught:
        optimizer.add_param_group({"params": [nn.Parameter(random((8, 6)))], key: value})
    assert "\n" not in str(caught.value)


@every
def test_lr_of_several_elements_is_rejected(name: str) -> None:
    with pytest.raises(OptimizerError, match=r"lr: expected .* got shape \(2,\)"):
        CASES[name]([nn.Parameter(random((8, 6)))], lr=torch.ones(2))


@pytest.mark.parametrize("start", [-0.1, 1.0, float("nan")])
def test_invalid_momentum_start_of_muon_is_rejected(start: float) -> None:
    with pytest.raises(OptimizerError, match="^momentum_start: expected .* got"):
        Muon([nn.Parameter(random((8, 6)))], momentum_start=start)


def test_step_in_backward_accepts_betas_as_a_list() -> None:
    """A list of two betas is not one value for each of two parameters."""
    params = [nn.Parameter(random((8, 6), seed)) for seed in range(2)]
    settings: dict[str, Any] = {"lr": 0.02, "betas": [0.8, 0.9]}
    ours = step_in_backward(GaLore(params, **settings))
    expected = GaLore([nn.Parameter(p.detach().clone()) for p in params], **settings)
    for step in range(3):
        for index, (p, q) in enumerate(zip(params, params_of(expected), strict=True)):
            q.grad = random(p.shape, 10 * step + index)
            (p * q.grad).sum().backward()
        ours.step()
        expected.step()
    assert differences(snapshot(ours), snapshot(expected)) == []


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
