"""KV-cache codecs: rounding error, size, and independence of groups, heads and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from whimbrel.base.errors import CacheError, ConfigError
from whimbrel.cache import DynamicCache, find_codec
from whimbrel.ops.lowbit import AffineCodec, GroupCodec

CODED = ["fp8", "int8", "int4"]
FINITE = st.floats(-(2.0**120), 2.0**120, width=32)


@pytest.fixture(params=CODED)
def codec(request: pytest.FixtureRequest) -> GroupCodec:
    return find_codec(request.param)


def in_groups(states: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The minimum and maximum of the group of each value."""
    parts = states.split(group, dim=-1)
    low, high = (
        torch.cat([bound(part).expand_as(part) for part in parts], dim=-1)
        for bound in (lambda part: part.amin(-1, keepdim=True), lambda part: part.amax(-1, keepdim=True))
    )
    return low, high


@pytest.mark.parametrize("name", CODED)
@settings(deadline=None, max_examples=100)
@example(numbers=np.array([[0, 8.362374e-37]], dtype=np.float32))
@given(
    numbers=arrays.arrays("float32", st.tuples(st.integers(1, 3), st.sampled_from([2, 30, 64, 80])), elements=FINITE)
)
def test_values_are_restored_within_half_a_step(name: str, numbers: object):
    codec, states = find_codec(name), torch.from_numpy(numbers)
    codes, scales = codec.encode(states)
    size = states.size(-1)
    assert codes.shape[-1] == codec.code_width(size)
    assert scales.shape[-1] == codec.scale_width(size)
    error = (codec.decode(codes, scales, torch.float64) - states).abs()
    if name == "int4":  # in groups with outliers, the step is up to 1/255 of the largest value
        low, high = in_groups(states, codec.group_size)
        span = (states.amax(-1, keepdim=True) - states.amin(-1, keepdim=True)).double()
        base = states.abs().amax(-1, keepdim=True).double() / 100
        allowed = ((high - low).double() + (span + base) * 3 / 255) / 15 / 2 * 1.02 + base * 1e-5
        tiny = (
            2.0**-133 * 255 * 15
        )  # such small scales are multiples of bf16's smallest subnormal, amplified up to 255 x 15 times
        assert bool((error <= allowed + tiny).all())
        return
    steps = scales.double().repeat_interleave(min(codec.group_size, size), dim=-1)[..., :size]
    if name == "fp8":  # three mantissa bits; subnormals below 2^-6 are 2^-9 apart
        allowed = torch.maximum(states.double().abs() / 16, steps / 1024)
    else:
        allowed = steps / 2
    assert bool((error <= allowed * 1.001 + 1e-37).all())  # scales this small are not exact


def test_bits_per_value(codec: GroupCodec):
    codes, scales = codec.encode(torch.randn(2, 3, 5, 128, dtype=torch.bfloat16))
    assert codes.dtype == codec.code_dtype
    per_number = 8 * (codes.nbytes + scales.nbytes) / (2 * 3 * 5 * 128)
    assert scales.dtype == codec.scale_dtype
    assert per_number == {"fp8": 8.25, "int8": 8.25, "int4": 6.375}[codec.name]


def test_integer_states_are_rejected_and_nothing_is_stored(codec: GroupCodec):
    integers, cache = torch.ones(1, 1, 1, 4, dtype=torch.int32), DynamicCache(codec=codec.name)
    with pytest.raises(CacheError, match="expected a floating-point dtype, got torch.int32"):
        cache.update(integers, integers, 0)
    assert cache.layers == []


@pytest.mark.parametrize("largest", [1, 10, 100])
def test_an_outlier_channel_does_not_affect_other_groups_in_int4(largest: float):
    """Keys have such channels."""
    states = torch.randn(200, 64)
    states[:, 17] = largest * (1 + 0.1 * torch.randn(200))
    codec = find_codec("int4")
    error = (codec.decode(*codec.encode(states), torch.float32) - states).square()
    others = torch.arange(64) // 8 != 2
    # A step is the range of 8 normal numbers (2.85 on average) over 15, and the rounding of minima and scales.
    step = 3.1 / 15 + largest / 255 / 15 + largest / 255
    assert error[:, others].mean() < step**2 / 12 * 1.2


def test_heads_are_encoded_independently(codec: GroupCodec):
    states = torch.randn(4, 2, 6, 128)
    encoded = codec.encode(states)
    for tensor, part in zip(encoded, codec.encode(states[1:2, 1:, 3:4]), strict=True):
        assert torch.equal(tensor[1:2, 1:, 3:4], part)
    broken = states.clone()
    broken[:, 0, 3] = float("nan")
    decoded = codec.decode(*codec.encode(broken), torch.float32)
    assert decoded[:, 0, 3].isnan().all()
    decoded[:, 0, 3] = 0
    assert decoded.isfinite().all()


@pytest.mark.parametrize("codec", ["fp8", "int8"], indirect=True)
def test_eight_bit_groups_are_encoded_independently(codec: GroupCodec):
    states = torch.randn(4, 2, 6, 128)
    encoded = codec.encode(states)
    alone = codec.encode(states[1:2, :, 3:4])
    broken = states.clone()
    broken[:, :, 0, :] = 1e20
    broken[:, :, 3, 64:] = float("nan")
    for tensor, part, other in zip(encoded, alone, codec.encode(broken), strict=True):
        assert torch.equal(tensor[1:2, :, 3:4], part)
        half = tensor.size(-1) // 2
        assert torch.equal(tensor[:, :, 3, :half], other[:, :, 3, :half])
        assert torch.equal(tensor[:, :, 4:], other[:, :, 4:])
    decoded = codec.decode(*codec.encode(broken), torch.float32)
    assert decoded[:, :, 3, 64:].isnan().all()
    assert decoded[:, :, 3, :64].isfinite().all()


def test_zeros_and_the_largest_value_are_restored(codec: GroupCodec):
    states = torch.zeros(1, 1, 2, 64)
    states[..., 1, 5], states[..., 1, 6] = 3.0, -3.0
    decoded = codec.decode(*codec.encode(states), torch.float32)
    assert torch.equal(decoded[..., 0, :], states[..., 0, :])
    if isinstance(codec, AffineCodec):
        torch.testing.assert_close(decoded, states, rtol=0.02, atol=0.51 * 6 * 1.02 / 15)
    else:
        torch.testing.assert_close(decoded, states, rtol=4e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_are_decoded_to_the_requested_dtype(codec: GroupCodec, dtype: torch.dtype):
    states = torch.randn(2, 64, dtype=dtype)
    decoded = codec.decode(*codec.encode(states), dtype)
    assert decoded.dtype == dtype
    assert (decoded - states).abs().max() < 0.5


def test_none_means_no_codec():
    assert find_codec("none") is None


def test_unknown_codecs_and_odd_head_sizes_are_rejected():
    with pytest.raises(ConfigError, match="expected one of none, fp8, int8, int4, got 'int3'"):
        find_codec("int3")
    with pytest.raises(ConfigError, match="expected an even number of values, got 7"):
        find_codec("int4").encode(torch.randn(2, 7))
