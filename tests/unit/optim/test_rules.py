"""Update rules against torch's optimizers, or against their equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.optim.optimizer_cases import parameters, params_of, random
from torch import Tensor, nn

from whimbrel.optim import LowRankOptimizer, Muon
from whimbrel.optim.rules import orthogonalize

MATRICES = [(24, 16), (16, 24), (72, 60)]


def weights(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    return [nn.Parameter(random(shape, seed)) for seed, shape in enumerate(shapes)]


def same_steps(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, steps: int = 6) -> None:
    """Both step with the same gradients and agree after each step."""
    for step in range(steps):
        for index, (p, q) in enumerate(zip(params_of(ours), params_of(theirs), strict=True)):
            p.grad = q.grad = random(p.shape, 100 * step + index) * 10.0 ** (step - 3)
        ours.step()
        theirs.step()
        for p, q in zip(params_of(ours), params_of(theirs), strict=True):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("maximize", [False, True])
def test_adamw_equals_torch(maximize: bool) -> None:
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
    settings["maximize"] = maximize
    same_steps(LowRankOptimizer(parameters(), **settings), torch.optim.AdamW(parameters(), **settings))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torch(momentum: float) -> None:
    ours = LowRankOptimizer(parameters(), lr=1e-3, rule="sgd", momentum=momentum)
    same_steps(ours, torch.optim.SGD(parameters(), lr=1e-3, momentum=momentum))


def test_muon_rule_equals_the_muon_class() -> None:
    settings: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    same_steps(LowRankOptimizer(weights(MATRICES), rule="muon", **settings), Muon(weights(MATRICES), **settings))


def test_muon_rule_splits_stacks_and_uses_adamw_for_vectors() -> None:
    stack, vector = nn.Parameter(random((3, 8, 6))), nn.Parameter(random((5,), 3))
    alone = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    ours, theirs = LowRankOptimizer([stack, vector], lr=0.02, rule="muon"), Muon(alone, lr=0.02)
    for step in range(3):
        stack.grad, vector.grad = random((3, 8, 6), step), random((5,), step)
        for p, grad in zip(alone, stack.grad, strict=True):
            p.grad = grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in alone]), atol=1e-6, rtol=1e-5)
    assert set(ours.state[vector]) == {"step", "seed", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("shape", MATRICES)
def test_adafactor_equals_torch(shape: tuple[int, ...]) -> None:
    """torch's step is relative to the size of the weight, ours is absolute."""
    ours, theirs = (nn.Parameter(random(shape)) for _ in range(2))
    mine = LowRankOptimizer([ours], lr=1.0, rule="adafactor")
    peer = torch.optim.Adafactor([theirs], lr=0.01, weight_decay=0.0)
    for step in range(6):
        ours.grad = theirs.grad = random(shape, step + 1) * 10.0 ** (step - 3)
        size = max(1e-3, float(theirs.detach().square().mean().sqrt())) * min(0.01, (step + 1) ** -0.5)
        before = ours.detach().clone(), theirs.detach().clone()
        mine.step()
        peer.step()
        directions = before[0] - ours.detach(), (before[1] - theirs.detach()) / size
        torch.testing.assert_close(*directions, atol=1e-3, rtol=1e-3)


def test_lion_matches_the_equation() -> None:
    p = nn.Parameter(random((24, 16)))
    lr, (b1, b2), decay = 0.01, (0.9, 0.97), 0.1
    optimizer = LowRankOptimizer([p], lr=lr, rule="lion", betas=(b1, b2), weight_decay=decay)
    expected, m = p.detach().double(), torch.zeros(24, 16, dtype=torch.float64)
    for step in range(5):
        p.grad = random((24, 16), step + 1)
        g = p.grad.double()
        expected = (1 - lr * decay) * expected - lr * (b1 * m + (1 - b1) * g).sign()
        m = b2 * m + (1 - b2) * g
        optimizer.step()
        torch.testing.assert_close(p.detach().double(), expected, atol=1e-6, rtol=1e-5)


def direct_adafactor(grads: list[Tensor]) -> Tensor:
    """Shazeer and Stern (2018), algorithm 4, without relative steps."""
    rows = columns = torch.zeros(())
    for t, g in enumerate((g.double() for g in grads), start=1):
        beta = 1 - t**-0.8
        rows = beta * rows + (1 - beta) * (g * g + 1e-30).sum(dim=1)
        columns = beta * columns + (1 - beta) * (g * g + 1e-30).sum(dim=0)
        u = g / (rows[:, None] * columns[None, :] / rows.sum()).sqrt()
        u = u / max(1.0, float(u.square().mean().sqrt()))
    return u


def test_adafactor_matches_the_equation() -> None:
    p, grads = nn.Parameter(random((24, 16))), [random((24, 16), seed) for seed in range(1, 6)]
    optimizer = LowRankOptimizer([p], lr=1.0, rule="adafactor")
    for grad in grads:
        before = p.detach().clone()
        p.grad = grad
        optimizer.step()
    torch.testing.assert_close((before - p.detach()).double(), direct_adafactor(grads), atol=1e-5, rtol=1e-5)


def polar_factor(matrices: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    return (u @ vh).to(matrices.dtype)


@pytest.mark.parametrize("shape", [(64, 64), (128, 32), (32, 128), (3, 48, 16)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_orthogonalize_moves_singular_values_to_one_and_keeps_singular_vectors(
    shape: tuple[int, ...], scale: float
) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale
    factors = orthogonalize(matrices)
    values = torch.linalg.svdvals(factors)
    assert values.min() > 0.8
    assert values.max() < 1.2
    reference = polar_factor(matrices)
    assert (factors - reference).norm() / reference.norm() < 0.15


def test_orthogonalize_keeps_a_zero_matrix() -> None:
    assert orthogonalize(torch.zeros(8, 8)).abs().max() == 0


def test_orthogonalize_treats_matrices_of_a_stack_independently() -> None:
    stack = torch.randn(4, 24, 40, generator=torch.Generator().manual_seed(2))
    alone = torch.stack([orthogonalize(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack), alone, atol=1e-5, rtol=1e-5)
