"""Invariants of every optimizer: extreme but finite gradients give finite weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.optim.optimizer_cases import CASES, parameters, params_of, random, run_steps
from torch import Tensor, nn

from whimbrel.optim import GaLoreWarm, project_in_backward, step_in_backward

every = pytest.mark.parametrize("name", CASES)
LARGE = [
    (torch.float32, 1e16),
    (torch.float32, 1e21),
    (torch.float32, 3e38),
    (torch.bfloat16, 1e21),
    (torch.bfloat16, 3e38),
    (torch.float16, 1e4),
    (torch.float16, 65504.0),
]
"""Squares and sums of products of these overflow fp32 or fp16."""
SMALL = [
    (torch.float32, 1e-25),
    (torch.float32, 1e-38),
    (torch.float32, 1e-44),
    (torch.bfloat16, 1e-38),
    (torch.float16, 6e-8),
]
"""Squares of these are zero in fp32."""


def extreme(p: Tensor, seed: int, size: float) -> Tensor:
    """A gradient of this magnitude with random signs; the first row has one sign, so that its sums are large too."""
    signs = random(p.shape, seed).sign()
    if p.ndim > 1:
        signs[0] = 1.0
    return (signs.double() * size).to(p.dtype)


def learning_rate(name: str, dtype: torch.dtype) -> float:
    """SGD does not normalize: at its usual rate its updates overflow fp16, as torch's do."""
    return 1e-6 if "sgd" in name and dtype == torch.float16 else CASES[name].lr


def takes_eps(name: str) -> bool:
    defaults = CASES[name]([nn.Parameter(random((8, 6)))]).defaults
    return name in ("muon", "normuon") or defaults.get("rule", "adamw") == "adamw"


@every
@pytest.mark.parametrize(("dtype", "size"), LARGE, ids=str)
def test_large_finite_gradients_give_finite_weights(name: str, dtype: torch.dtype, size: float) -> None:
    optimizer = CASES[name](parameters(dtype), lr=learning_rate(name, dtype))
    before = [p.detach().clone() for p in params_of(optimizer)]
    gradients: list[Tensor] = []
    for step in range(7):  # includes a second refresh
        gradients = [extreme(p, 100 * step + index, size) for index, p in enumerate(params_of(optimizer))]
        for p, grad in zip(params_of(optimizer), gradients, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        for p, grad in zip(params_of(optimizer), gradients, strict=True):
            assert torch.equal(p.grad, grad), "the gradient belongs to the caller"
    assert optimizer.skipped == 0
    for old, p in zip(before, params_of(optimizer), strict=True):
        assert p.isfinite().all()
        assert p.ndim < 2 or not torch.equal(old, p)  # a small vector may end where it started
    for p in params_of(optimizer):
        assert all(tensor.isfinite().all() for tensor in optimizer.state[p].values())
    run_steps(optimizer, range(10, 13))
    assert all(p.isfinite().all() for p in params_of(optimizer))


@every
def test_one_large_gradient_does_not_affect_other_parameters(name: str) -> None:
    """Large elements are clamped; other gradients are used unchanged."""
    ours, expected = CASES[name](parameters()), CASES[name](parameters())
    for step in range(3):
        for optimizer in (ours, expected):
            for index, p in enumerate(params_of(optimizer)):
                p.grad = random(p.shape, 100 * step + index)
        params_of(ours)[0].grad *= 1e30
        ours.step()
        expected.step()
    for p, q in list(zip(params_of(ours), params_of(expected), strict=True))[1:]:
        assert torch.equal(p, q)
    assert params_of(ours)[0].isfinite().all()


@every
@pytest.mark.parametrize(("dtype", "size"), SMALL, ids=str)
def test_tiny_gradients_give_finite_weights(name: str, dtype: torch.dtype, size: float) -> None:
    optimizer = CASES[name](parameters(dtype))
    for step in range(7):
        for index, p in enumerate(params_of(optimizer)):
            p.grad = extreme(p, 100 * step + index, size)
        optimizer.step()
    assert optimizer.skipped == 0
    assert all(p.isfinite().all() for p in params_of(optimizer))


@pytest.mark.parametrize("name", [name for name in CASES if takes_eps(name)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eps_of_zero_gives_finite_weights(name: str, dtype: torch.dtype) -> None:
    """Gradients of rank 1, with zeros in every other row and in the first step."""
    optimizer = CASES[name](parameters(dtype), eps=0.0)
    for step in range(7):
        for p in params_of(optimizer):
            p.grad = torch.full_like(p, float(step))
            if p.ndim:
                p.grad[::2] = 0
        optimizer.step()
    assert optimizer.skipped == 0
    assert all(p.isfinite().all() for p in params_of(optimizer))


@pytest.mark.parametrize(("dtype", "size"), LARGE, ids=str)
@pytest.mark.parametrize("start", ["gradient", "random"])
@pytest.mark.parametrize("wrap", [step_in_backward, project_in_backward])
def test_large_finite_gradients_in_backward(wrap: Any, dtype: torch.dtype, size: float, start: str) -> None:
    """Only the projections of the largest values are not finite; those steps are skipped."""
    p = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    optimizer = wrap(GaLoreWarm([p], lr=0.01, rank=8, gap=3, start=start))
    for step in range(5):
        (p * extreme(p, step, size)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert p.isfinite().all()
    if wrap is step_in_backward or size < 1e38:
        assert optimizer.skipped == 0
        assert p.any()
