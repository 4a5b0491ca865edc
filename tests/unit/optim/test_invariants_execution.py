"""Invariants of every optimizer: foreach, compiled and split updates agree."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
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

from whimbrel.ops.compiler import find_compiler
from whimbrel.optim import lowrank, project_in_backward


@pytest.fixture
def quiet_compiler() -> Iterator[None]:
    """The compiler logs graph breaks, which are expected: step counts are read on the host."""
    torch._dynamo.reset()
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", LOW_RANK)
def test_foreach_equals_one_by_one(name: str) -> None:
    together, apart = (LOW_RANK[name](parameters(), foreach=foreach) for foreach in (True, False))
    run_steps(together, range(8))
    run_steps(apart, range(8))
    for key, value in snapshot(together).items():
        torch.testing.assert_close(snapshot(apart)[key], value, atol=1e-6, rtol=1e-5)


def optimizer_pair(
    name: str, shapes: Sequence[tuple[int, ...]], more: Sequence[tuple[int, ...]] = ()
) -> tuple[Any, Any]:
    """Two equal optimizers; `more` adds a second group with another learning rate."""
    found = []
    for _ in range(2):
        optimizer = CASES[name]([nn.Parameter(random(shape, i)) for i, shape in enumerate(shapes)])
        if more:
            params = [nn.Parameter(random(shape, i)) for i, shape in enumerate(more)]
            optimizer.add_param_group({"params": params, "lr": CASES[name].lr / 2})
        found.append(optimizer)
    return found[0], found[1]


@pytest.mark.parametrize("name", CASES)
def test_compiled_step_updates_every_parameter(name: str, quiet_compiler: None) -> None:
    """Equal and different shapes in two groups, a changing learning rate, and a missing gradient."""
    eager, compiled = optimizer_pair(name, [(24, 16), (24, 16), (16, 24), (5,), (5,)], [(24, 16), (8, 6)])
    step = torch.compile(compiled.step, backend="aot_eager")
    before = snapshot(compiled)
    for seed in range(3):
        for optimizer in (eager, compiled):
            optimizer.param_groups[-1]["lr"] = CASES[name].lr / (2 + seed)
            for index, p in enumerate(params_of(optimizer)):
                p.grad = None if (seed, index) == (1, 0) else random(p.shape, 100 * seed + index)
        eager.step()
        step()
    after = snapshot(compiled)
    for index, _ in enumerate(params_of(compiled)):
        assert not torch.equal(before[f"{index}"], after[f"{index}"])
    for key, value in snapshot(eager).items():
        torch.testing.assert_close(after[key], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_compiled_step_skips_nonfinite_gradients(name: str, quiet_compiler: None) -> None:
    _, optimizer = optimizer_pair(name, [(24, 16), (24, 16)])
    step = torch.compile(optimizer.step, backend="aot_eager")
    first, second = params_of(optimizer)
    before = snapshot(optimizer)
    first.grad, second.grad = random((24, 16)), torch.full((24, 16), math.nan)
    step()
    assert optimizer.skipped == 1
    assert differences(before, snapshot(optimizer)) == []


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["galore_warm", "muon"])
def test_inductor_compiled_step_updates_every_parameter(name: str, quiet_compiler: None) -> None:
    eager, compiled = optimizer_pair(name, [(24, 16), (24, 16), (5,)])
    step = torch.compile(compiled.step)
    for optimizer in (eager, compiled):
        for index, p in enumerate(params_of(optimizer)):
            p.grad = random(p.shape, index + 1)
    eager.step()
    step()
    for key, value in snapshot(eager).items():
        torch.testing.assert_close(snapshot(compiled)[key], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_compiled_step_of_projections_updates_every_parameter(accumulation: int, quiet_compiler: None) -> None:
    eager, compiled = (
        project_in_backward(o, accumulation=accumulation) for o in optimizer_pair("galore_warm", [(24, 16)] * 3)
    )
    step = torch.compile(compiled.step, backend="aot_eager")
    for seed in range(3):
        for wrapper, run in ((eager, eager.step), (compiled, step)):
            for micro in range(accumulation):
                for index, p in enumerate(params_of(wrapper)):
                    (p * random(p.shape, 100 * seed + 10 * micro + index)).sum().backward()
            run()
            for p in params_of(wrapper):
                p.grad = None
    for key, value in snapshot(eager).items():
        torch.testing.assert_close(snapshot(compiled)[key], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", LOW_RANK)
def test_large_parameters_are_updated_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows at a time; stochastic rounding uses other random numbers, so it agrees less."""
    whole, cut = (LOW_RANK[name](parameters()) for _ in range(2))
    run_steps(whole, range(8))
    monkeypatch.setattr(lowrank, "BATCH_ELEMENTS", 100)
    run_steps(cut, range(8))
    plain = whole.defaults["store"] == "fp32"
    for a, b in zip(params_of(whole), params_of(cut), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 if plain else 0.03, rtol=1e-4)
