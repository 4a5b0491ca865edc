"""Training of int8 weights: small updates add up, and resume is bit-identical."""

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
    ParameterInfo,
    QGaLore,
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


def make_net(*, quantized: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 96)).to(dtype)
    if quantized:
        quantize_(model, "int8", trainable=True)
    return model


def make_optimizer(name: str, model: nn.Module) -> LowRankOptimizer:
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
def test_quantized_weights_learn_like_dense_ones(name: str) -> None:
    losses = {}
    for quantized in (False, True):
        model = make_net(quantized=quantized)
        optimizer = make_optimizer(name, model)
        losses[quantized] = [step(model, optimizer, number) for number in range(120)]
    assert losses[True][0] == pytest.approx(losses[False][0], rel=0.01)
    assert losses[True][-1] < 0.99 * losses[True][0]
    assert losses[True][-1] == pytest.approx(losses[False][-1], rel=0.05, abs=0.3)
    assert isinstance(model[0].weight, QuantizedWeight)


@every_one
def test_resume_of_quantized_weights_is_bit_identical(name: str) -> None:
    whole = make_net()
    optimizer = make_optimizer(name, whole)
    for number in range(14):
        if number == 7:
            saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
        step(whole, optimizer, number)
    again = make_net()
    other = make_optimizer(name, again)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for number in range(7, 14):
        step(again, other, number)
    for one, two in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_updates_smaller_than_a_quantization_step_add_up() -> None:
    """Rounded to nearest, a change of a hundredth of a quantization step would be lost."""
    weight = nn.Parameter(QuantizedWeight.quantize(torch.ones(64, 128), "int8"))
    optimizer, before = AdamW8bit([weight], lr=1e-4, weight_decay=0.0), float(weight.dequantize().mean())
    for _ in range(100):
        weight.grad = torch.ones(64, 128)
        optimizer.step()
    assert float(weight.dequantize().mean()) == pytest.approx(before - 1e-2, abs=1e-3)


def test_weights_without_an_update_keep_their_codes() -> None:
    """A new scale would round every code of its row again, so scales change rarely."""
    weight = nn.Parameter(QuantizedWeight.quantize(torch.randn(32, 128), "int8"))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    largest = weight.dequantize().abs().argmax(dim=1)
    weight.grad = torch.zeros(32, 128)
    for number in range(6):
        weight.grad[torch.arange(32), largest] = -weight.dequantize()[torch.arange(32), largest].sign()
        optimizer.step()
        if number == 0:  # gives the scales headroom
            before = weight.codes.clone()
    changed = (weight.codes != before).sum(dim=1)
    assert changed.max() <= 1


def test_left_and_right_projection_give_the_same_steps() -> None:
    """A matrix and its transpose: in one of them rows of codes are columns of the matrix view."""
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
        assert moved(side).mean() < 2  # in quantization steps, after six stochastic roundings


@pytest.mark.parametrize("linears", [False, True])
def test_gradients_projected_in_backward(linears: bool) -> None:
    model = make_net(dtype=torch.bfloat16)
    inner = GaLoreWarm(model.parameters(), lr=3e-3, rank=16, side="cheapest", start="random")
    optimizer = project_in_backward(inner, accumulation=1, model=model if linears else None)
    losses = [step(model, optimizer, number) for number in range(60)]
    assert losses[-1] < 0.93 * losses[0]
    assert isinstance(model[0].weight, QuantizedWeight)


@pytest.mark.parametrize("name", ["muon", "galore"])
def test_dense_only_optimizers_are_rejected(name: str) -> None:
    parameters = [
        ParameterInfo(name=f"{i}.weight", parameter=p, role="hidden") for i, p in enumerate(make_net().parameters())
    ]
    with pytest.raises(OptimizerError, match=rf"{name}: expected unquantized weights.*0.weight.*galore_warm"):
        build_optimizer(OptimConfig(name=name), parameters)


def test_muon_rejects_quantized_weights() -> None:
    with pytest.raises(OptimizerError, match="expected unquantized weights.* AdamW8bit"):
        Muon(make_net().parameters(), rule="adam")
