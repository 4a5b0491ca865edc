"""QAT and fp8 recipes are bit-identical to torchao: codes, scales and outputs."""

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


def torchao_config(ao: ModuleType, name: str) -> Any:
    """The torchao config that corresponds to a QAT recipe."""
    int4: Any = torch.int4  # type: ignore[attr-defined, unused-ignore]
    if name == "int4-weight-only":
        return ao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=ao.PerGroup(128))
    return ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=int4, weight_granularity=ao.PerGroup(32))


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 128, bias=False)).to(dtype)
    with torch.no_grad():
        model[0].weight[3] = 0.0
        model[0].weight[4, :128] *= 1e-6
        model[0].weight[5] = model[0].weight[5].abs()
    return model


def parts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacked codes (int8) and scales."""
    if isinstance(weight, QuantizedWeight):
        return weight.format.unpack(weight.codes, torch.int8), weight.scales
    return weight.qdata, weight.scale  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["int4-weight-only", "int8-dynamic-act-int4-weight"])
def test_qat_training_and_conversion_equal_torchao(ao: ModuleType, name: str) -> None:
    """Weights and outputs after training, then codes, scales and outputs after conversion."""
    from torchao.quantization.qat import QATConfig

    ours, theirs = make_model(torch.float32), make_model(torch.float32)
    x = torch.randn(5, 7, 256, generator=torch.Generator().manual_seed(1))
    ao.quantize_(theirs, QATConfig(torchao_config(ao, name), step="prepare"))
    prepare(ours, name)
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    rounded = ours(x).detach()
    assert torch.equal(rounded, theirs(x))
    finalize(ours, name)
    ao.quantize_(theirs, QATConfig(torchao_config(ao, name), step="convert"))
    for index in (0, 2):
        (codes, scales), (their_codes, their_scales) = parts(ours[index].weight), parts(theirs[index].weight)
        assert (codes.dtype, scales.dtype) == (their_codes.dtype, their_scales.dtype) == (torch.int8, torch.float32)
        assert torch.equal(codes, their_codes)
        assert torch.equal(scales, their_scales)
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours(x), rounded)


@pytest.mark.parametrize("name", ["int4-weight-only", "int8-dynamic-act-int4-weight"])
def test_post_training_quantization_equals_torchao(ao: ModuleType, name: str) -> None:
    ours = make_model(torch.float32)
    theirs = copy.deepcopy(ours)
    finalize(ours, name)
    ao.quantize_(theirs, torchao_config(ao, name))
    assert ours[0].weight.format == RECIPES[name].finalize == FORMATS[ours[0].weight.format.name]
    for value, expected in zip(parts(ours[0].weight), parts(theirs[0].weight), strict=True):
        assert torch.equal(value, expected)
    assert torch.equal(ours[0].weight.dequantize(), theirs[0].weight.dequantize())


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_fp8_training_equals_torchao(ao: ModuleType, name: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    ours, theirs = make_model(torch.float32), make_model(torch.float32)
    prepare(ours, name)
    convert_to_float8_training(theirs, config=replace(Float8LinearConfig.from_recipe_name(name), emulate=True))
    x = torch.randn(4, 8, 256, generator=torch.Generator().manual_seed(1))
    for model in (ours, theirs):
        model(x).square().mean().backward()
    assert torch.equal(ours(x), theirs(x))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
