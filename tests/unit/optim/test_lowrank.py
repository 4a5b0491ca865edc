"""The low-rank optimizer: sides, descriptions, groups, schedulers, dtypes, devices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.optim.optimizer_cases import (
    LOW_RANK,
    Teacher,
    differences,
    parameters,
    params_of,
    random,
    run_steps,
    snapshot,
)
from torch import nn

from whimbrel.optim import AdamW8bit, GaLoreWarm, LowRankOptimizer
from whimbrel.optim.param_state import ON_HOST

SIDES = [
    ("right", (24, 16), (24, 4), (16, 4)),
    ("right", (16, 24), (16, 4), (24, 4)),
    ("left", (24, 16), (16, 4), (24, 4)),
    ("std", (24, 16), (24, 4), (16, 4)),
    ("std", (16, 24), (24, 4), (16, 4)),
    ("cheapest", (24, 16), (16, 4), (24, 4)),
    ("cheapest", (16, 24), (16, 4), (24, 4)),
]


@pytest.mark.parametrize(("side", "shape", "moments", "basis"), SIDES)
def test_side_determines_shapes(
    side: str, shape: tuple[int, ...], moments: tuple[int, ...], basis: tuple[int, ...]
) -> None:
    """The cheapest side has the smaller moments, of which there are two, and the larger basis."""
    p = nn.Parameter(random(shape))
    optimizer = LowRankOptimizer([p], rank=4, side=side)
    assert optimizer.state[p]["exp_avg"].shape == moments
    assert optimizer.basis(p).shape == basis
    run_steps(optimizer, range(3))
    assert optimizer.as_matrix(p, p).shape == (moments[0], basis[0])


@pytest.mark.parametrize("rule", ["adamw", "sgd", "lion", "muon", "adafactor"])
@pytest.mark.parametrize("basis_store", ["fp32", "int4"])
@pytest.mark.parametrize("shape", [(80, 60), (60, 80), (2, 60, 80), (64, 16, 3, 3)])
def test_cheapest_side_has_the_smallest_state(rule: str, basis_store: str, shape: tuple[int, ...]) -> None:
    settings: dict[str, Any] = {"rank": 8, "rule": rule, "basis_store": basis_store, "store": "int8"}
    p = nn.Parameter(torch.empty(shape, device="meta"))
    taken = {
        side: LowRankOptimizer([p], side=side, **settings).state_bytes(p) for side in ("right", "left", "cheapest")
    }
    assert taken["cheapest"] == min(taken.values())


WORDS = [
    ({}, (24, 16), "adamw"),
    ({"rank": 4}, (24, 16), "warm rank 4, adamw"),
    ({"rank": 4}, (24,), "adamw"),
    ({"rank": 99}, (24, 16), "warm rank 16, adamw"),
    ({"rank": 4, "side": "left"}, (24, 16), "warm rank 4, adamw, left"),
    ({"rank": 4, "back_projection": "fira", "subspace": "svd"}, (24, 16), "svd rank 4, adamw, fira"),
    ({"rank": 4, "basis_store": "int4", "store": "int8"}, (72, 60), "warm rank 4, adamw, basis int4, int8"),
    ({"store": "int8"}, (24, 16), "adamw"),
    ({"rule": "muon"}, (5,), "adamw"),
]


@pytest.mark.parametrize(("settings", "shape", "words"), WORDS)
def test_describe_names_subspace_rule_and_storage(settings: dict[str, Any], shape: tuple[int, ...], words: str) -> None:
    p = nn.Parameter(random(shape))
    assert LowRankOptimizer([p], **settings).describe(p) == words


def test_groups_are_independent() -> None:
    """One group with a subspace and one without are updated as if each were alone."""
    hidden, head = nn.Parameter(random((24, 16))), nn.Parameter(random((10, 16), 1))
    both = GaLoreWarm([{"params": [hidden]}, {"params": [head], "rank": None, "lr": 0.1, "betas": (0.5, 0.9)}], rank=4)
    twins = [nn.Parameter(p.detach().clone()) for p in (hidden, head)]
    alone = GaLoreWarm(twins[:1], rank=4), torch.optim.AdamW(twins[1:], lr=0.1, betas=(0.5, 0.9), weight_decay=0.0)
    for step in range(6):
        for p, twin in zip((hidden, head), twins, strict=True):
            p.grad, twin.grad = random(p.shape, step), random(p.shape, step)
        both.step()
        for optimizer in alone:
            optimizer.step()
    for p, twin in zip((hidden, head), twins, strict=True):
        torch.testing.assert_close(p, twin, atol=1e-6, rtol=1e-5)


def test_torch_scheduler_changes_the_learning_rate() -> None:
    optimizer = LowRankOptimizer(parameters(), lr=0.1, rank=4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    run_steps(optimizer, range(1))
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    before = snapshot(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    run_steps(optimizer, range(1, 3))
    assert all(" " in key for key in differences(before, snapshot(optimizer)))


def test_learning_rate_may_be_a_tensor() -> None:
    number, tensor = (LowRankOptimizer(parameters(), lr=lr, rank=4) for lr in (0.1, torch.tensor(0.1)))
    run_steps(number, range(4))
    run_steps(tensor, range(4))
    for a, b in zip(params_of(number), params_of(tensor), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", LOW_RANK)
def test_parameters_of_several_dtypes_in_one_group(name: str) -> None:
    params = [
        nn.Parameter(random((72, 60), dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ]
    optimizer = LOW_RANK[name](params, lr=0.01)
    start = [p.detach().clone() for p in params]
    run_steps(optimizer, range(3))
    moved = [(p.detach() - s).double() for p, s in zip(params, start, strict=True)]
    assert [p.dtype for p in params] == [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    assert all(change.isfinite().all() and change.abs().max() > 0 for change in moved)


def test_empty_parameters_are_skipped() -> None:
    params = [nn.Parameter(torch.zeros(0, 5)), nn.Parameter(torch.zeros(0)), nn.Parameter(random((8, 6)))]
    optimizer = AdamW8bit(params)
    run_steps(optimizer, range(2))
    assert int(optimizer.state[params[2]]["step"]) == 2


def test_skip_nonfinite_can_be_disabled() -> None:
    p = nn.Parameter(random((8, 6)))
    optimizer = LowRankOptimizer([p])
    optimizer.skip_nonfinite = False
    p.grad = torch.full((8, 6), math.nan)
    optimizer.step()
    assert optimizer.skipped == 0
    assert p.isnan().all()


def test_seed_determines_the_run() -> None:
    first, again, other = (
        LOW_RANK["apollo"]([nn.Parameter(random((24, 16), dtype=torch.bfloat16))], seed=seed) for seed in (1, 1, 2)
    )
    for optimizer in (first, again, other):
        run_steps(optimizer, range(4))
    assert differences(snapshot(first), snapshot(again)) == []
    assert "0" in differences(snapshot(first), snapshot(other))


def test_random_bases_differ_between_parameters() -> None:
    params = [nn.Parameter(random((24, 16))) for _ in range(3)]
    optimizer = LOW_RANK["apollo"](params)
    bases = [optimizer.basis(p) for p in params]
    assert not torch.equal(bases[0], bases[1])
    assert not torch.equal(bases[1], bases[2])


def test_global_rng_state_is_not_used() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for entry in LOW_RANK.values():
        optimizer = entry([nn.Parameter(random((72, 60), dtype=torch.bfloat16))])
        run_steps(optimizer, range(2))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOW_RANK)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_and_resume_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    teacher = Teacher(dtype)
    teacher.x, teacher.y = teacher.x.cuda(), teacher.y.cuda()
    teacher.params = [nn.Parameter(p.detach().cuda()) for p in teacher.params]
    optimizer = LOW_RANK[name](teacher.params)
    before, after = teacher.fit(optimizer, 60)
    assert after < before / 5
    copies = LOW_RANK[name]([nn.Parameter(p.detach().clone()) for p in teacher.params])
    copies.load_state_dict(optimizer.state_dict())
    for one in (optimizer, copies):
        for seed in range(8):
            for index, p in enumerate(params_of(one)):
                p.grad = random(p.shape, 100 * seed + index).to(p)
            one.step()
    assert differences(snapshot(optimizer), snapshot(copies)) == []


def test_frozen_parameter_has_no_state_until_its_first_update() -> None:
    frozen, free = nn.Parameter(torch.randn(8, 8), requires_grad=False), nn.Parameter(torch.randn(8, 8))
    optimizer = GaLoreWarm([frozen, free], rank=2)
    assert not optimizer.state[frozen]
    assert optimizer.state[free]
    free.grad = torch.randn(8, 8)
    optimizer.step()
    assert not optimizer.state[frozen]
    frozen.requires_grad_().grad = torch.randn(8, 8)
    before = frozen.detach().clone()
    optimizer.step()
    assert not torch.equal(frozen, before)
    later = optimizer.state_dict()
    again = GaLoreWarm([nn.Parameter(frozen.detach().clone()), nn.Parameter(free.detach().clone())], rank=2)
    again.load_state_dict(later)
    assert torch.equal(again.state[again.param_groups[0]["params"][0]]["exp_avg"], optimizer.state[frozen]["exp_avg"])


@pytest.mark.gpu
def test_state_moves_with_the_model() -> None:
    """`transformers.Trainer` moves a model after its optimizer is built."""
    model = nn.Linear(8, 16)
    optimizer = GaLoreWarm(model.parameters(), rank=2)
    for device in ("cuda", "cpu"):
        model.to(device)
        model(torch.randn(4, 8, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state[model.weight]
        assert {t.device.type for name, t in state.items() if name not in ON_HOST} == {device}
        assert {state[name].device.type for name in ON_HOST} == {"cpu"}
    assert int(state["step"]) == 2
