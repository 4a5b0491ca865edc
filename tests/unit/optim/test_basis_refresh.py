"""Basis refreshes: when they happen, gaps, and the transfer of moments."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.unit.optim.optimizer_cases import random, run_steps, transferred_moments
from torch import Tensor, nn

from whimbrel.optim import GaLoreWarm, LowRankOptimizer
from whimbrel.optim.param_state import planned_refreshes


def refreshed(optimizer: LowRankOptimizer, steps: int, grad: Tensor | None = None) -> list[list[int]]:
    """Indices of the parameters that got a new basis in each step."""
    found = []
    params = optimizer.param_groups[0]["params"]
    for step in range(steps):
        found.append([index for index, p in enumerate(params) if optimizer.is_refresh_due(p)])
        for index, p in enumerate(params):
            p.grad = random(p.shape, step * 100 + index) if grad is None else grad.clone()
        optimizer.step()
    return found


@pytest.mark.parametrize("gap", [1, 2, 7])
def test_refreshes_are_one_gap_apart(gap: int) -> None:
    """From the second refresh on; the first gap depends on the index of the parameter."""
    optimizer = LowRankOptimizer([nn.Parameter(random((8, 6)))], rank=2, gap=gap)
    steps = [step for step, indices in enumerate(refreshed(optimizer, 5 * gap + 2)) if indices]
    assert steps[0] == 0
    assert max(1, gap // 2) <= steps[1] <= max(1, 2 * gap)
    assert {b - a for a, b in pairwise(steps[1:])} == {gap}


@pytest.mark.parametrize(("count", "max_refreshes"), [(40, 3), (7, 1), (100, 7)])
def test_refreshes_are_staggered_after_the_first_step(count: int, max_refreshes: int) -> None:
    optimizer = LowRankOptimizer([nn.Parameter(random((4, 3), i)) for i in range(count)], rank=1, gap=20)
    steps = refreshed(optimizer, 80)
    assert len(steps[0]) == count
    assert max(len(indices) for indices in steps[1:]) <= max_refreshes
    assert set(Counter(index for indices in steps[31:71] for index in indices).values()) == {2}


def test_first_refreshes_are_staggered_with_random_start() -> None:
    optimizer = LowRankOptimizer([nn.Parameter(random((4, 3), i)) for i in range(40)], rank=1, gap=20, start="random")
    steps = refreshed(optimizer, 80)
    assert max(len(indices) for indices in steps) <= 5
    assert {index for indices in steps[:20] for index in indices} == set(range(40))


@pytest.mark.parametrize("subspace", ["warm", "svd"])
def test_lazy_gap_doubles_while_the_basis_is_stable(subspace: str) -> None:
    """Up to eight times the option."""
    optimizer = LowRankOptimizer([nn.Parameter(random((8, 6)))], rank=2, gap=4, lazy=True, subspace=subspace)
    grad = torch.diag(torch.tensor([9.0, 8, 0.1, 0.1, 0.1, 0.1])) @ random((6, 6))
    grad = torch.cat((grad, torch.zeros(2, 6)))
    steps = [step for step, indices in enumerate(refreshed(optimizer, 120, grad)) if indices]
    assert [b - a for a, b in pairwise(steps[1:])] == [8, 16, 32, 32]


def test_lazy_gap_halves_while_the_basis_changes() -> None:
    """Down to an eighth of the option: bases of noise hardly overlap."""
    optimizer = LowRankOptimizer([nn.Parameter(random((8, 64)))], rank=2, gap=16, lazy=True)
    steps = [step for step, indices in enumerate(refreshed(optimizer, 40)) if indices]
    assert [b - a for a, b in pairwise(steps[1:])][:5] == [8, 4, 2, 2, 2]


def test_gap_is_constant_without_lazy() -> None:
    optimizer = LowRankOptimizer([nn.Parameter(random((64, 64)))], rank=2, gap=4)
    refreshed(optimizer, 20)
    assert all(int(state["gap"]) == 4 for state in optimizer.state.values())


def test_failed_refresh_is_counted_and_retried() -> None:
    p = nn.Parameter(random((8, 6)))
    optimizer = GaLoreWarm([p], rank=2, gap=3)
    assert refreshed(optimizer, 2, torch.zeros(8, 6)) == [[0], [0]]
    assert int(optimizer.state[p]["failures"]) == 2
    assert refreshed(optimizer, 2) == [[0], []]
    basis = optimizer.basis(p).clone()
    assert int(optimizer.state[p]["step"]) == 2
    refreshed(optimizer, 6, torch.zeros(8, 6))
    assert int(optimizer.state[p]["failures"]) > 2
    assert torch.equal(optimizer.basis(p), basis)


@pytest.mark.parametrize("subspace", ["warm", "svd"])
@pytest.mark.parametrize("shape", [(24, 16), (3, 10, 8)])
def test_transfer_of_both_moments_matches_the_equation(subspace: str, shape: tuple[int, ...]) -> None:
    """The moments of the step are computed from the transferred ones."""
    p, (b1, b2) = nn.Parameter(random(shape)), (0.8, 0.95)
    settings: dict[str, Any] = {"subspace": subspace, "betas": (b1, b2), "moment_transfer": "both", "gap": 4}
    optimizer = LowRankOptimizer([p], rank=4, **settings)
    state = optimizer.state[p]
    while not (optimizer.is_refresh_due(p) and int(state["step"])):
        p.grad = random(shape, int(state["step"]) + 1)
        optimizer.step()
    t, old = int(state["step"]), optimizer.basis(p).double().clone()
    m, v = state["exp_avg"].double().clone(), state["exp_avg_sq"].double().clone()
    p.grad = random(shape, 77)
    optimizer.step()
    new = optimizer.basis(p).double()
    assert (new - old).abs().max() > 0.1
    m, v = transferred_moments(m, v, old.mT @ new, (b1, b2), t)
    low = p.grad.double() @ new
    m, v = b1 * m + (1 - b1) * low, b2 * v + (1 - b2) * low**2
    torch.testing.assert_close(state["exp_avg"].double(), m, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(state["exp_avg_sq"].double(), v, atol=1e-6, rtol=1e-4)
    assert (state["exp_avg_sq"] >= 0).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"subspace": "svd", "moment_transfer": "both"},
        {"subspace": "svd", "moment_transfer": "both", "side": "left"},
        {"subspace": "warm", "moment_transfer": "both"},
    ],
    ids=str,
)
def test_full_rank_sgd_in_a_subspace_equals_sgd(settings: dict[str, Any]) -> None:
    """Unlike Adam, SGD is rotation-invariant, so a change of basis must have no effect."""
    side = (16, 24) if settings.get("side") == "left" else (24, 16)
    ours, theirs = (nn.Parameter(random(side)) for _ in range(2))
    low_rank = LowRankOptimizer([ours], lr=0.1, rule="sgd", rank=16, gap=3, **settings)
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for step in range(12):
        ours.grad, theirs.grad = random(side, step), random(side, step)
        low_rank.step()
        sgd.step()
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_first_basis_from_a_gradient_resets_moments_of_the_random_one() -> None:
    optimizer = LowRankOptimizer([nn.Parameter(random((8, 6), i)) for i in range(3)], rank=2, gap=8, start="random")
    waiting = optimizer.param_groups[0]["params"][1]
    state, before = optimizer.state[waiting], int(optimizer.state[waiting]["due"])
    assert before > 1
    torch.testing.assert_close(optimizer.basis(waiting).mT @ optimizer.basis(waiting), torch.eye(2), atol=1e-6, rtol=0)
    run_steps(optimizer, range(before))
    assert int(state["step"]) == before
    assert state["exp_avg"].abs().max() > 0
    run_steps(optimizer, range(before, before + 1))
    assert int(state["step"]) == 1
    low = waiting.grad @ optimizer.basis(waiting)
    torch.testing.assert_close(state["exp_avg"], 0.1 * low, atol=1e-6, rtol=1e-5)


def test_gap_changed_on_resume_takes_effect() -> None:
    def warm(gap: int) -> GaLoreWarm:
        torch.manual_seed(0)
        return GaLoreWarm([nn.Parameter(torch.randn(12, 8))], rank=2, gap=gap)

    def step(optimizer: GaLoreWarm, seed: int) -> None:
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = torch.randn(12, 8, generator=torch.Generator().manual_seed(seed))
        optimizer.step()

    first, second = warm(4), warm(50)
    for seed in range(9):
        step(first, seed)
    saved = first.state_dict()
    saved["param_groups"][0]["gap"] = 50
    second.load_state_dict(saved)
    (p,) = second.param_groups[0]["params"]
    for seed in range(9, 20):
        step(second, seed)
    assert int(second.state[p]["due"]) > 50


@pytest.mark.parametrize("subspace", ["warm", "svd"])
def test_failed_refresh_does_not_adapt_the_gap(subspace: str) -> None:
    p = nn.Parameter(torch.randn(12, 8))
    optimizer = LowRankOptimizer([p], rank=2, gap=4, lazy=True, subspace=subspace)
    p.grad = torch.randn(12, 8)
    optimizer.step()
    p.grad = torch.zeros(12, 8)
    for _ in range(30):
        optimizer.step()
    assert int(optimizer.state[p]["gap"]) == 4
    assert int(optimizer.state[p]["failures"]) > 3


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_refresh_succeeds_for_gradients_of_any_scale(size: float) -> None:
    p = nn.Parameter(torch.randn(24, 16))
    optimizer = GaLoreWarm([p], rank=4, gap=2)
    for seed in range(8):
        p.grad = torch.randn(24, 16, generator=torch.Generator().manual_seed(seed)) * size
        optimizer.step()
    assert int(optimizer.state[p]["failures"]) == 0


@pytest.mark.parametrize("start", ["random", "gradient"])
def test_refreshes_happen_at_the_planned_steps(start: str) -> None:
    params = [nn.Parameter(random((12, 8), seed)) for seed in range(5)]
    optimizer = GaLoreWarm(params, rank=2, gap=7, start=start)
    refreshed: list[list[int]] = [[] for _ in params]
    for step in range(40):
        for index, p in enumerate(params):
            if optimizer.is_refresh_due(p):
                refreshed[index].append(step)
            p.grad = random((12, 8), 100 * step + index)
        optimizer.step()
    assert refreshed == [planned_refreshes(optimizer.layout_of(p), 40) for p in params]
    assert len({tuple(steps) for steps in refreshed}) == 5
