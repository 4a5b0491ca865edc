"""The parts that all low-bit codecs share, and the codecs of optimizer state."""

from __future__ import annotations

import pytest
import torch

from whimbrel.base.errors import ConfigError
from whimbrel.ops.lowbit import (
    BLOCK_SIZE,
    FP8,
    INT4,
    INT8,
    UINT8,
    FloatCodec,
    PowerCodec,
    SymmetricCodec,
    hash_uniform,
    pack_nibbles,
    quantize_tokens_affine,
    scale_groups_,
    split_groups,
    stochastic_round,
    unpack_nibbles,
)

POWER_CODECS = [PowerCodec(INT4), PowerCodec(INT8), PowerCodec(INT8, 2), PowerCodec(UINT8, 4)]
CPU = torch.device("cpu")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("width", [1, 2, 7, 8])
def test_int4_packing_puts_even_elements_in_the_low_nibble(width: int) -> None:
    codes = torch.randint(0, 16, (3, width), dtype=torch.uint8)
    packed = pack_nibbles(codes, fill=8)
    assert packed.shape == (3, (width + 1) // 2)
    assert torch.equal(packed[:, 0] & 15, codes[:, 0])
    assert torch.equal(unpack_nibbles(packed)[:, :width], codes)
    if width % 2:
        assert (unpack_nibbles(packed)[:, width] == 8).all()


@pytest.mark.parametrize(("group_size", "groups"), [(None, 1), (4, 3), (5, 2), (64, 1)])
def test_groups_divide_the_last_dimension_and_only_the_last_is_shorter(group_size: int | None, groups: int) -> None:
    x = randn(2, 10)
    split = split_groups(x, group_size)
    assert split.shape[:2] == (2, groups)
    assert torch.equal(split.flatten(-2)[:, :10], x)
    assert torch.equal(split[:, -1].amax(-1), x[:, (groups - 1) * split.shape[-1] :].amax(-1))
    scales = torch.arange(1.0, 2 * groups + 1).view(2, groups)
    size = min(group_size or 10, 10)
    expected = x * scales.repeat_interleave(size, dim=-1)[:, :10]
    assert torch.equal(scale_groups_(x.clone(), scales, group_size), expected)


@pytest.mark.parametrize("code_type", [INT8, INT4, FP8], ids=lambda kind: kind.name)
def test_a_symmetric_codec_restores_integer_multiples_of_its_scale(code_type) -> None:
    codec = SymmetricCodec(code_type, 4)
    x = torch.tensor([[-7.5, 1.0, 7.0, -1.0, 0.0, 0.0, 0.0, 0.0]]) * (code_type.max - code_type.min) / 15
    codes, scales = codec.encode(x)
    assert codes.shape[-1] == codec.code_width(8)
    assert scales.shape[-1] == codec.num_groups(8) == codec.scale_width(8) == 2
    decoded = codec.decode(codes, scales, torch.float32)
    assert (decoded - x).abs().max() <= (0.5 if code_type is not FP8 else 14)
    assert torch.equal(decoded[:, 4:], x[:, 4:])


def test_an_odd_number_of_int4_values_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected an even number of values, got 7"):
        SymmetricCodec(INT4).encode(randn(2, 7))


@pytest.mark.parametrize("width", [7, 256, 300])
@pytest.mark.parametrize("codec", POWER_CODECS, ids=lambda codec: f"{codec.code_type.name}-{codec.power}")
def test_a_power_codec_restores_values_within_a_level_and_zeros_exactly(codec: PowerCodec, width: int) -> None:
    x = randn(4, width)
    if codec.code_type is UINT8:
        x = x.abs()
    stored = codec.allocate(x.shape, CPU)
    assert codec.nbytes(x.shape) == sum(tensor.nbytes for tensor in stored)
    assert stored[1].shape == (4, -(-width // BLOCK_SIZE))
    assert not codec.decode(stored, width).any()
    codec.encode_(stored, x)
    decoded = codec.decode(stored, width)
    assert decoded.shape == x.shape
    levels, largest = codec.code_type.max, x.abs().max()
    ratios, found = ((value.abs() / largest) ** (1 / codec.power) for value in (x, decoded))
    assert ((ratios - found).abs() <= 0.51 / levels).all()


def test_stochastic_rounding_is_unbiased() -> None:
    x = randn(200).abs() + 0.1
    for codec in (FloatCodec(torch.bfloat16), PowerCodec(INT8)):
        stored, total = codec.allocate(x.shape, CPU), torch.zeros_like(x)
        for seed in range(500):
            codec.encode_(stored, x, hash_uniform(x.shape, seed * 7919, 0, CPU))
            total += codec.decode(stored, len(x))
        step = x / 256 if isinstance(codec, FloatCodec) else x.max() / 127
        assert ((total / 500 - x).abs() < 0.15 * step).all()


def test_values_exact_in_bf16_are_unchanged() -> None:
    x = torch.cat((randn(100), torch.tensor([0.0, float("inf"), -float("inf")]))).bfloat16()
    assert torch.equal(stochastic_round(x.float(), torch.bfloat16), x)


def test_fp16_is_rounded_to_one_of_the_two_neighbors() -> None:
    x = randn(500)
    rounded = stochastic_round(x, torch.float16)
    assert rounded.dtype == torch.float16
    assert ((rounded.float() - x).abs() <= x.abs() * 2.0**-10).all()


def test_stochastic_rounding_to_other_dtypes_is_rejected() -> None:
    with pytest.raises(ValueError, match="expected bfloat16 or float16"):
        stochastic_round(randn(3), torch.float64)


def test_hashed_noise_does_not_depend_on_how_a_tensor_is_split() -> None:
    noise = hash_uniform((64, 32), 5, 0, CPU)
    assert torch.equal(noise[16:], hash_uniform((48, 32), 5, 16 * 32, CPU))
    assert noise.min() >= 0
    assert noise.max() < 1
    assert abs(noise.mean().item() - 0.5) < 0.02


def test_affine_quantization_represents_zero_exactly() -> None:
    x = randn(5, 64).abs() + 3
    x[:, 0] = 0
    codes, scales, zeros = quantize_tokens_affine(x)
    decoded = (codes.float() - zeros) * scales
    assert not decoded[:, 0].any()
    assert ((decoded - x).abs() <= scales * 0.51).all()
