"""Weight formats: rounding error, supported shapes, stochastic rounding and activation quantization."""

from __future__ import annotations

import pytest
import torch

from whimbrel.base.errors import PrecisionError
from whimbrel.precision import FORMATS, QuantizedWeight, WeightFormat, find_format
from whimbrel.precision.formats import quantize_tokens

NAMES = list(FORMATS)
STEPS = {"int8": 1 / 127.5, "int4": 1 / 7.5, "fp8": 1 / 8}
"""The largest gap between adjacent levels, relative to the maximum of the group."""


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def groups(weight_format: WeightFormat, weight: torch.Tensor) -> torch.Tensor:
    return weight.unflatten(-1, (-1, weight_format.group_size or weight.shape[-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_restored_within_half_a_step(name: str, dtype: torch.dtype) -> None:
    weight_format, weight = FORMATS[name], randn(48, 256, dtype=dtype)
    codes, scales = weight_format.encode(weight)
    assert codes.dtype == weight_format.dtype
    assert (tuple(codes.shape), tuple(scales.shape)) == weight_format.part_shapes(weight.shape)
    assert weight_format.weight_shape(codes) == tuple(weight.shape)
    assert scales.dtype == dtype
    back = weight_format.decode(codes, scales)
    assert back.dtype == dtype
    largest = groups(weight_format, weight.float()).abs().amax(-1, keepdim=True)
    error = groups(weight_format, (back.float() - weight.float()).abs())
    coarse = 1.001 if dtype == torch.float32 else 1.6  # scales and products are rounded too
    lost = (
        1.0 if weight_format.codes != "fp8" else 0.5
    )  # the largest positive code of int8 and int4 is half a step short
    assert (error <= largest * STEPS[weight_format.codes] * lost * coarse).all()
    inside = groups(weight_format, weight.float()) < 0.9 * largest
    assert (error[inside] <= (largest * STEPS[weight_format.codes] / 2 * coarse).expand_as(error)[inside]).all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_independent(name: str) -> None:
    weight_format, weight = FORMATS[name], randn(32, 128)
    codes, scales = weight_format.encode(weight)
    some = weight_format.encode(weight[5:9])
    assert torch.equal(codes[5:9].view(torch.uint8), some[0].view(torch.uint8))
    assert torch.equal(scales[5:9], some[1])


def test_int4_packs_even_columns_in_the_low_nibble() -> None:
    weight_format = WeightFormat("small", "int4", group_size=4)
    codes, scales = weight_format.encode(torch.tensor([[-7.5, 1.0, 7.0, -1.0]]))
    assert scales.tolist() == [[1.0]]
    assert codes.tolist() == [[(1 + 8) << 4 | 0, (-1 + 8) << 4 | 7 + 8]]
    assert weight_format.decode(codes, scales).tolist() == [[-8.0, 1.0, 7.0, -1.0]]


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zero(name: str) -> None:
    weight_format = FORMATS[name]
    assert not weight_format.decode(*weight_format.encode(torch.zeros(16, 128))).any()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    weight_format, weight = FORMATS[name], randn(4, 128) * 0.5
    weight[:, 0] = 4.0  # so that no other value is clipped
    total = torch.zeros_like(weight)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        total += weight_format.decode(
            *weight_format.encode(weight, noise=torch.rand(weight.shape, generator=generator))
        )
    step = 4.0 * STEPS[weight_format.codes]
    assert ((total / 400 - weight)[:, 1:].abs() < 0.12 * step).all()
    nearest = weight_format.decode(*weight_format.encode(weight))
    assert (nearest - weight).abs()[:, 1:].max() > 0.45 * step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_scales_keeps_scales_that_still_fit(dtype: torch.dtype) -> None:
    weight_format, weight = FORMATS["int8"], randn(6, 128)
    scales = weight_format.encode(weight.to(dtype))[1]
    full = 127 * scales.float()
    moved = (
        weight / weight.abs().amax(-1, keepdim=True) * full * torch.tensor([0.99, 0.6, 0.4, 1.02, 3.0, 0.0])[:, None]
    )
    renewed = weight_format.codec.update_scales(scales, moved)
    assert renewed.dtype == dtype
    assert (renewed == scales).flatten().tolist() == [True, True, False, False, False, False]
    assert (127 * renewed.float() >= moved.abs().amax(-1, keepdim=True)).all()  # no value is clipped
    assert (127 * renewed.float()[2:5] <= 1.06 * moved[2:5].abs().amax(-1, keepdim=True)).all()  # and the range is used
    assert torch.equal(weight_format.codec.update_scales(renewed, moved), renewed)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("int4", (64, 80), "multiple of 32, got 80"),
        ("int8-dynamic-act-int4-weight", (64, 48), "multiple of 32, got 48"),
        ("fp8", (64, 24), "columns to be a multiple of 16, got 24"),
        ("fp8", (24, 64), "rows to be a multiple of 16, got 24"),
        ("int8-dynamic", (12, 64), "multiples of 8"),
        ("int8", (2, 3, 4), "3 dimensions"),
    ],
)
def test_unsupported_shapes_have_a_reason(name: str, shape: tuple[int, ...], reason: str) -> None:
    assert reason in str(FORMATS[name].unsupported_reason(shape))


@pytest.mark.parametrize(("columns", "group"), [(256, 128), (576, 64), (96, 32)])
def test_int4_uses_the_largest_group_size_that_divides_the_columns(columns: int, group: int) -> None:
    weight_format, weight = FORMATS["int4"], torch.randn(8, columns, generator=torch.Generator().manual_seed(0))
    assert weight_format.unsupported_reason(weight.shape) is None
    assert weight_format.fit_to(weight.shape).group_size == group
    quantized = QuantizedWeight.quantize(weight, "int4")
    assert quantized.scales.shape == (8, columns // group)
    largest = weight.unflatten(-1, (-1, group)).abs().amax(-1, keepdim=True).expand(-1, -1, group).flatten(-2)
    assert ((quantized.dequantize() - weight).abs() <= largest / 7.5 * 0.501).all()


def test_int8_supports_every_matrix() -> None:
    assert FORMATS["int8"].unsupported_reason((3, 5)) is None


def test_an_unknown_format_is_rejected() -> None:
    with pytest.raises(PrecisionError, match=r"weight_format: expected one of .* got 'int9': did you mean 'int8'\?"):
        find_format("int9")


@pytest.mark.parametrize("kind", ["int8", "int8-asymmetric", "fp8"])
def test_activations_have_one_scale_per_token(kind: str) -> None:
    x = randn(6, 64) * torch.logspace(-3, 3, 6)[:, None] + (3 if kind == "int8-asymmetric" else 0)
    codes, scales, zeros = quantize_tokens(x, kind)
    back = (codes.float() - (0 if zeros is None else zeros)) * scales
    span = (x.amax(-1) - x.amin(-1).clamp(max=0)) if zeros is not None else 2 * x.abs().amax(-1)
    step = span / 255 if kind != "fp8" else span / 2 / 16
    assert ((back - x).abs().amax(-1) <= 1.01 * step).all()
    assert (zeros is None) == (kind != "int8-asymmetric")
