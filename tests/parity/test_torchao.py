"""Our formats and recipes beside torchao's own: the same codes, scales and outputs, to the bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whimbrel.precision import FORMATS, RECIPES, QuantizedWeight, finalize, prepare


@pytest.fixture(scope="module")
def ao(torchao: ModuleType) -> Any:
    return torchao.quantization


def theirs(ao: ModuleType, name: str) -> Any:
    """The settings of torchao's that a QAT recipe stands for."""
    int4: Any = torch.int4  # type: ignore[attr-defined, unused-ignore]
    if name == "int4-weight-only":
        return ao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=ao.PerGroup(128))
    return ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=int4, weight_granularity=ao.PerGroup(32))


def net(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 128, bias=False)).to(dtype)
    with torch.no_grad():
        made[0].weight[3] = 0.0
        made[0].weight[4, :128] *= 1e-6
        made[0].weight[5] = made[0].weight[5].abs()
    return made


def parts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, one in a byte, and scales."""
    if isinstance(weight, QuantizedWeight):
        return weight.format.unpack(weight.codes, torch.int8), weight.scales
    return weight.qdata, weight.scale  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["int4-weight-only", "int8-dynamic-act-int4-weight"])
def test_qat_trains_and_ends_as_theirs(ao: ModuleType, name: str) -> None:
    """Their `prepare` and `convert`, and ours, in lock step: outputs, weights, then codes, scales and outputs."""
    from torchao.quantization.qat import QATConfig

    one, other = net(torch.float32), net(torch.float32)
    x = torch.randn(5, 7, 256, generator=torch.Generator().manual_seed(1))
    ao.quantize_(other, QATConfig(theirs(ao, name), step="prepare"))
    prepare(one, name)
    for made in (one, other):
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        for _ in range(3):
            made(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    rounded = one(x).detach()
    assert torch.equal(rounded, other(x))
    finalize(one, name)
    ao.quantize_(other, QATConfig(theirs(ao, name), step="convert"))
    for index in (0, 2):
        (codes, scales), (their_codes, their_scales) = parts(one[index].weight), parts(other[index].weight)
        assert (codes.dtype, scales.dtype) == (their_codes.dtype, their_scales.dtype) == (torch.int8, torch.float32)
        assert torch.equal(codes, their_codes)
        assert torch.equal(scales, their_scales)
    assert torch.equal(one(x), other(x))
    assert torch.equal(one(x), rounded)


@pytest.mark.parametrize("name", ["int4-weight-only", "int8-dynamic-act-int4-weight"])
def test_a_trained_model_is_quantised_as_by_them(ao: ModuleType, name: str) -> None:
    one = net(torch.float32)
    other = copy.deepcopy(one)
    finalize(one, name)
    ao.quantize_(other, theirs(ao, name))
    assert one[0].weight.format == RECIPES[name].finalize == FORMATS[one[0].weight.format.name]
    for mine, their in zip(parts(one[0].weight), parts(other[0].weight), strict=True):
        assert torch.equal(mine, their)
    assert torch.equal(one[0].weight.dequantize(), other[0].weight.dequantize())


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_fp8_computes_what_theirs_does(ao: ModuleType, name: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    one, other = net(torch.float32), net(torch.float32)
    prepare(one, name)
    convert_to_float8_training(other, config=replace(Float8LinearConfig.from_recipe_name(name), emulate=True))
    x = torch.randn(4, 8, 256, generator=torch.Generator().manual_seed(1))
    for made in (one, other):
        made(x).square().mean().backward()
    assert torch.equal(one(x), other(x))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one.parameters(), other.parameters(), strict=True))
