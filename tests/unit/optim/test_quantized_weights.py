"""Weights that are stored as int8 codes are trained: small changes add up, and a resumed run goes on bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whimbrel.base.errors import OptimizerError
from whimbrel.optim import (
    AdamW8bit,
    Apollo,
    ApolloMini,
    Fira,
    GaLoreWarm,
    LDAdam,
    LowRankOptimizer,
    Muon,
    OptimConfig,
    QGaLore,
    RoutedParameter,
    build_optimizer,
    project_in_backward,
)
from whimbrel.precision import QuantizedWeight, quantize_

MAKES: dict[str, tuple[type[LowRankOptimizer], dict[str, Any]]] = {
    "adamw8bit": (AdamW8bit, {}),
    "galore_warm": (GaLoreWarm, {"rank": 16}),
    "galore_warm, left": (GaLoreWarm, {"rank": 16, "side": "left"}),
    "galore_warm, small": (GaLoreWarm, {"rank": 16, "side": "cheapest", "store": "int8", "basis_store": "int4"}),
    "qgalore": (QGaLore, {"rank": 16}),
    "apollo": (Apollo, {"rank": 16}),
    "apollo_mini": (ApolloMini, {}),
    "fira": (Fira, {"rank": 16}),
    "ldadam": (LDAdam, {"rank": 16}),
}
every_one = pytest.mark.parametrize("name", MAKES)
TARGET = torch.randn(96, 64, generator=torch.Generator().manual_seed(9))


def net(*, coded: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 96)).to(dtype)
    if coded:
        quantize_(model, "int8", trainable=True)
    return model


def made(name: str, model: nn.Module) -> LowRankOptimizer:
    cls, settings = MAKES[name]
    return cls(model.parameters(), lr=3e-3, **settings)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(number)).to(next(model.parameters()).dtype)
    loss = (model(x) - x @ TARGET.T.to(x.dtype)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@every_one
def test_codes_learn_as_plain_weights_do(name: str) -> None:
    losses = {}
    for coded in (False, True):
        model = net(coded=coded)
        optimizer = made(name, model)
        losses[coded] = [step(model, optimizer, number) for number in range(120)]
    assert losses[True][0] == pytest.approx(losses[False][0], rel=0.01)
    assert losses[True][-1] < 0.99 * losses[True][0]
    assert losses[True][-1] == pytest.approx(losses[False][-1], rel=0.05, abs=0.3)
    assert isinstance(model[0].weight, QuantizedWeight)


@every_one
def test_resumed_bit_for_bit(name: str) -> None:
    whole = net()
    optimizer = made(name, whole)
    for number in range(14):
        if number == 7:
            saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
        step(whole, optimizer, number)
    again = net()
    other = made(name, again)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for number in range(7, 14):
        step(again, other, number)
    for one, two in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_changes_below_a_step_of_the_codes_add_up() -> None:
    """Rounded to the nearest, a change of a hundredth of a step would never be seen."""
    weight = nn.Parameter(QuantizedWeight.quantize(torch.ones(64, 128), "int8"))
    optimizer, before = AdamW8bit([weight], lr=1e-4, weight_decay=0.0), float(weight.dequantize().mean())
    for _ in range(100):
        weight.grad = torch.ones(64, 128)
        optimizer.step()
    assert float(weight.dequantize().mean()) == pytest.approx(before - 1e-2, abs=1e-3)


def test_what_a_step_leaves_alone_chance_does_too() -> None:
    """Another scale would round every code of a row anew, also where the largest number of it grows a little."""
    weight = nn.Parameter(QuantizedWeight.quantize(torch.randn(32, 128), "int8"))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    largest = weight.dequantize().abs().argmax(dim=1)
    weight.grad = torch.zeros(32, 128)
    for number in range(6):
        weight.grad[torch.arange(32), largest] = -weight.dequantize()[torch.arange(32), largest].sign()
        optimizer.step()
        if number == 0:  # which gave each row some room
            before = weight.codes.clone()
    changed = (weight.codes != before).sum(dim=1)
    assert changed.max() <= 1


def test_the_same_steps_from_either_side() -> None:
    """A matrix and its transpose: the codes' rows are the columns of what is moved in one of them."""
    numbers, grads = torch.randn(48, 80), [torch.randn(48, 80) for _ in range(6)]

    def moved(side: str) -> Tensor:
        torch.manual_seed(0)
        weight = nn.Parameter(QuantizedWeight.quantize(numbers, "int8"))
        plain = nn.Parameter(weight.dequantize().clone())
        optimizers = [GaLoreWarm([p], lr=0.05, rank=8, side=side, weight_decay=0.1) for p in (weight, plain)]
        for grad in grads:
            for p, optimizer in zip((weight, plain), optimizers, strict=True):
                p.grad = grad
                optimizer.step()
        return (weight.dequantize() - plain).abs() / weight.scales

    for side in ("left", "right"):
        assert moved(side).mean() < 2  # steps of the codes, after six roundings by chance


@pytest.mark.parametrize("linears", [False, True])
def test_gradients_projected_in_backward(linears: bool) -> None:
    model = net(dtype=torch.bfloat16)
    inner = GaLoreWarm(model.parameters(), lr=3e-3, rank=16, side="cheapest", start="random")
    optimizer = project_in_backward(inner, accumulation=1, model=model if linears else None)
    losses = [step(model, optimizer, number) for number in range(60)]
    assert losses[-1] < 0.93 * losses[0]
    assert isinstance(model[0].weight, QuantizedWeight)


@pytest.mark.parametrize("name", ["muon", "galore"])
def test_optimizers_that_cannot_are_refused(name: str) -> None:
    routed = [RoutedParameter(name=f"{i}.weight", parameter=p, role="hidden") for i, p in enumerate(net().parameters())]
    with pytest.raises(OptimizerError, match=rf"{name}: expected unquantized weights.*0.weight.*galore_warm"):
        build_optimizer(OptimConfig(name=name), routed)


def test_muon_says_what_it_cannot_move() -> None:
    with pytest.raises(OptimizerError, match="expected unquantized weights.* AdamW8bit"):
        Muon(net().parameters(), rule="adam")
