"""Codes, scales and products beside torchao's own, in fp32."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

from whimbrel.precision import QuantizedWeight, quantize_


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 128, bias=False), nn.Linear(128, 32))
    with torch.no_grad():
        model[3].weight[3] = 0
    return model


def configs(ao: ModuleType) -> dict[str, object]:
    group, row, int4 = ao.granularity.PerGroup, ao.granularity.PerRow, torch.int4  # type: ignore[attr-defined]
    return {
        "int8": ao.Int8WeightOnlyConfig(granularity=row()),
        "int8-dynamic": ao.Int8DynamicActivationInt8WeightConfig(granularity=row()),
        "int8-dynamic-act-int4-weight": ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=int4, weight_granularity=group(32)
        ),
    }


def both(ao: ModuleType, name: str) -> tuple[nn.Module, nn.Module]:
    """The same model, quantised by us and by them."""
    ours, theirs = net(), net()
    taken = quantize_(ours, name, skip=()).selected
    assert taken
    if name == "int4":  # ours takes a smaller group where 128 does not divide a layer
        for path in taken:
            group = ao.granularity.PerGroup(ours.get_submodule(path).weight.format.group_size)  # type: ignore[attr-defined]
            config = ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group)  # type: ignore[attr-defined]
            ao.quantize_(theirs, config, filter_fn=lambda _, name, path=path: name == path)
    else:
        ao.quantize_(theirs, configs(ao)[name], filter_fn=lambda _, path: path in taken)
    return ours, theirs


@pytest.mark.parametrize("name", ["int8", "int8-dynamic", "int4", "int8-dynamic-act-int4-weight"])
def test_codes_and_scales_are_the_same_bits(torchao: ModuleType, name: str) -> None:
    ours, theirs = both(torchao.quantization, name)
    weights = {path: weight for path, weight in ours.named_parameters() if isinstance(weight, QuantizedWeight)}
    for path, weight in weights.items():
        other = theirs.get_parameter(path)
        codes = weight.format.unpack(weight.codes, torch.int8)
        assert torch.equal(codes, other.qdata), path
        scales, own = other.scale.reshape(weight.scales.shape), weight.dequantize().any(dim=-1)
        assert torch.equal(weight.scales[own], scales[own]), path  # a row of zeros may have any
        assert torch.equal(weight.dequantize(), other.dequantize()), path


@pytest.mark.parametrize("name", ["int4", "int8-dynamic-act-int4-weight"])
def test_outputs_are_the_same_bits(torchao: ModuleType, name: str) -> None:
    ours, theirs = both(torchao.quantization, name)
    x = torch.randn(3, 7, 256, generator=torch.Generator().manual_seed(1)) + 0.3
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["int8", "int8-dynamic"])
def test_outputs_are_close(torchao: ModuleType, name: str) -> None:
    ours, theirs = both(torchao.quantization, name)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mine, other = ours(x), theirs(x)
    assert (mine - other).norm() < 2e-3 * other.norm()
