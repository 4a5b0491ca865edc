"""Codes, scales and matmuls of weight formats against torchao, in fp32."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

from whimbrel.precision import QuantizedWeight, quantize_


def make_model() -> nn.Sequential:
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


def quantize_both(ao: ModuleType, name: str) -> tuple[nn.Module, nn.Module]:
    """The same model quantized by whimbrel and by torchao."""
    ours, theirs = make_model(), make_model()
    selected = quantize_(ours, name, skip=()).selected
    assert selected
    if name == "int4":  # whimbrel uses a smaller group if 128 does not divide the columns
        for path in selected:
            group = ao.granularity.PerGroup(ours.get_submodule(path).weight.format.group_size)  # type: ignore[attr-defined]
            config = ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group)  # type: ignore[attr-defined]
            ao.quantize_(theirs, config, filter_fn=lambda _, name, path=path: name == path)
    else:
        ao.quantize_(theirs, configs(ao)[name], filter_fn=lambda _, path: path in selected)
    return ours, theirs


@pytest.mark.parametrize("name", ["int8", "int8-dynamic", "int4", "int8-dynamic-act-int4-weight"])
def test_codes_and_scales_are_bit_identical(torchao: ModuleType, name: str) -> None:
    ours, theirs = quantize_both(torchao.quantization, name)
    weights = {path: weight for path, weight in ours.named_parameters() if isinstance(weight, QuantizedWeight)}
    for path, weight in weights.items():
        other = theirs.get_parameter(path)
        codes = weight.format.unpack(weight.codes, torch.int8)
        assert torch.equal(codes, other.qdata), path
        scales, nonzero = other.scale.reshape(weight.scales.shape), weight.dequantize().any(dim=-1)
        assert torch.equal(weight.scales[nonzero], scales[nonzero]), path  # the scale of a zero row is arbitrary
        assert torch.equal(weight.dequantize(), other.dequantize()), path


@pytest.mark.parametrize("name", ["int4", "int8-dynamic-act-int4-weight"])
def test_outputs_are_bit_identical(torchao: ModuleType, name: str) -> None:
    ours, theirs = quantize_both(torchao.quantization, name)
    x = torch.randn(3, 7, 256, generator=torch.Generator().manual_seed(1)) + 0.3
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["int8", "int8-dynamic"])
def test_outputs_are_close(torchao: ModuleType, name: str) -> None:
    ours, theirs = quantize_both(torchao.quantization, name)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mine, other = ours(x), theirs(x)
    assert (mine - other).norm() < 2e-3 * other.norm()
