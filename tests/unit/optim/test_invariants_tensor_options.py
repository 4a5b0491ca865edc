"""Invariants of every optimizer: tensor options."""

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
