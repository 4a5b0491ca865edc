"""Storage of optimizer state: round-trip errors, bytes, and stochastic rounding."""

from __future__ import annotations

import pytest
import torch
from tests.unit.optim.optimizer_cases import random
from torch import Tensor

from whimbrel.base.errors import OptimizerError
from whimbrel.ops.lowbit import hash_uniform, stochastic_round
from whimbrel.optim.param_state import StateCodec, add_with_stochastic_rounding_, state_codec

WIDTHS = [1, 2, 7, 64, 255, 256, 257, 700]
KINDS = [
    ("fp32", "basis"),
    ("fp32", "signed"),
    ("fp32", "positive"),
    ("bf16", "basis"),
    ("bf16", "signed"),
    ("bf16", "positive"),
    ("int8", "basis"),
    ("int8", "signed"),
    ("int8", "positive"),
    ("int4", "basis"),
]
WORST = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.5 / 127, "int4": 0.5 / 7}
"""Maximum error with evenly spaced levels, relative to the maximum of the block."""


def stored(kind: StateCodec, numbers: Tensor, noise: Tensor | None = None) -> tuple[Tensor, ...]:
    buffers = kind.allocate(numbers.shape, numbers.device)
    kind.encode_(buffers, numbers.clone(), noise)
    return buffers


def round_trip(kind: StateCodec, numbers: Tensor, noise: Tensor | None = None) -> Tensor:
    return kind.decode(stored(kind, numbers, noise), numbers.shape[-1])


def blocks(numbers: Tensor) -> Tensor:
    """The maximum magnitude of the block of 256 of each number."""
    width = numbers.shape[-1]
    return torch.cat([b.abs().amax(-1, keepdim=True).expand_as(b) for b in numbers.split(256, -1)], -1)[..., :width]


@pytest.mark.parametrize(("store", "kind"), KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_round_trip_error_is_at_most_half_a_level(store: str, kind: str, width: int) -> None:
    numbers = random((3, 5, width)) * torch.tensor([1e-8, 1.0, 1e6])[:, None, None]
    numbers = numbers.square() if kind == "positive" else numbers
    back = round_trip(state_codec(store, kind), numbers)
    assert back.shape == numbers.shape
    assert back.dtype == torch.float32
    share, near = (numbers / blocks(numbers)).abs(), (back / blocks(numbers)).abs()
    if store == "int8" and kind != "basis":  # levels are evenly spaced in a root
        levels, power = (127, 2) if kind == "signed" else (255, 4)
        assert (share ** (1 / power) - near ** (1 / power)).abs().max() <= 0.5 / levels + 1e-5
    else:
        assert (share - near).abs().max() <= WORST[store] + 1e-6
    assert ((back == 0) | (back.sign() == numbers.sign())).all()


@pytest.mark.parametrize(("store", "kind"), KINDS)
def test_second_round_trip_is_lossless(store: str, kind: str) -> None:
    once = round_trip(state_codec(store, kind), random((6, 300)).abs())
    torch.testing.assert_close(round_trip(state_codec(store, kind), once), once, atol=0, rtol=1e-6)


@pytest.mark.parametrize(("store", "kind"), KINDS)
def test_zeros_are_exact(store: str, kind: str) -> None:
    own = state_codec(store, kind)
    assert torch.equal(own.decode(own.allocate((4, 33), torch.device("cpu")), 33), torch.zeros(4, 33))
    numbers = random((4, 33)).abs()
    numbers[1] = 0
    numbers[2, ::2] = 0
    back = round_trip(own, numbers)
    assert back.isfinite().all()
    assert (back[1] == 0).all()
    assert (back[2, ::2] == 0).all()


@pytest.mark.parametrize(("store", "kind"), KINDS)
@pytest.mark.parametrize("shape", [(7,), (5, 1), (3, 255), (2, 3, 513), (4, 256)])
def test_nbytes_matches_the_allocation(store: str, kind: str, shape: tuple[int, ...]) -> None:
    own = state_codec(store, kind)
    for device in ("cpu", "meta"):
        assert sum(t.nbytes for t in own.allocate(shape, torch.device(device))) == own.nbytes(shape)


def test_int4_takes_half_a_byte() -> None:
    assert state_codec("int4", "basis").nbytes((1024, 256)) == 1024 * (128 + 4)
    assert state_codec("int8", "signed").nbytes((1024, 256)) == 1024 * (256 + 4)


@pytest.mark.parametrize("store", ["bf16", "int8"])
def test_stochastic_rounding_of_second_moments_is_unbiased(store: str) -> None:
    """The mean of a thousand roundings of the same numbers."""
    numbers = random((2, 40)).square()
    noise = torch.rand(1000, 2, 40, generator=torch.Generator().manual_seed(0))
    own = state_codec(store, "positive")
    root = torch.stack([round_trip(own, numbers, one) for one in noise])
    if store == "int8":  # the code is unbiased; it is proportional to the fourth root
        root, numbers = root**0.25, numbers**0.25
    assert ((root.mean(0) - numbers).abs() <= 4 * root.std(0) / 1000**0.5 + 1e-5).all()
    assert (root.std(0) > 0).float().mean() > 0.8


@pytest.mark.parametrize("store", ["bf16", "int8"])
def test_second_moments_track_changes_smaller_than_a_level(store: str) -> None:
    """v <- 0.999 v in each step; rounded to nearest it would never change."""
    own = state_codec(store, "positive")
    moment = torch.ones(1, 4096)
    moment[0, ::256] = 4.0  # fixes the scale of each block
    generator = torch.Generator().manual_seed(0)
    buffers = stored(own, moment)
    for _ in range(500):
        moment = own.decode(buffers, 4096).clone()
        held = moment[0, ::256].clone()
        moment *= 0.999
        moment[0, ::256] = held
        own.encode_(buffers, moment, torch.rand(moment.shape, generator=generator))
    mean = own.decode(buffers, 4096)[0, 1::256].mean()
    assert abs(float(mean) / 0.999**500 - 1) < 0.1


def test_stochastic_rounding_to_bf16_is_unbiased() -> None:
    numbers = torch.tensor([1.0 + 2**-9, -3.3, 1e-30, -1e30, 0.0, 5.0])
    many = torch.stack(
        [stochastic_round(numbers, torch.bfloat16, torch.Generator().manual_seed(i)).float() for i in range(2000)]
    )
    assert many.unique(dim=0).shape[0] > 2
    for i, number in enumerate(numbers.tolist()):
        assert many[:, i].unique().numel() <= 2
        assert abs(float(many[:, i].double().mean()) - number) <= 2**-7 * abs(number) * 4 * 0.5 / 2000**0.5
    assert stochastic_round(torch.tensor([float("inf"), -float("inf")]), torch.bfloat16).isinf().all()
    assert stochastic_round(torch.tensor([float("nan")]), torch.bfloat16).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_16_bit_weights_accumulate_small_changes(dtype: torch.dtype, size: float) -> None:
    weight = torch.full((20000,), size, dtype=dtype)
    start = float(weight[0])
    change = start * torch.finfo(dtype).eps / 50
    add_with_stochastic_rounding_(weight, torch.full((20000,), change), torch.Generator().manual_seed(0))
    moved = float(weight.double().mean()) - start
    assert abs(moved / change - 1) < 0.3
    assert weight.unique().numel() == 2


def test_fp32_weights_are_updated_exactly() -> None:
    weight = torch.ones(4)
    add_with_stochastic_rounding_(weight, torch.full((4,), 1e-6), torch.Generator())
    assert torch.equal(weight, torch.ones(4) + 1e-6)


@pytest.mark.parametrize("start", [0, 1 << 20, (1 << 32) - 7])
def test_noise_is_uniform_and_uncorrelated(start: int) -> None:
    """Along a row, down a column of any width, and from step to step (successive seeds)."""
    count, device = 1 << 16, torch.device("cpu")
    x, later = (hash_uniform((count,), 12345 + step * 0x61559F6A, start, device).double() for step in (0, 1))
    assert x.min() >= 0
    assert x.max() <= 1 - 2**-16
    assert abs(float(x.mean()) - 0.5) < 5 * (1 / 12 / count) ** 0.5
    found = torch.histc(x, 64, 0, 1)
    assert float(((found - count / 64) ** 2 / (count / 64)).sum()) < 63 + 5 * (2 * 63) ** 0.5  # chi squared
    for other in (later, *(x.roll(step) for step in (1, 2, 3, 7, 64, 255, 256, 512, 4096))):
        assert abs(float(((x - 0.5) * (other - 0.5)).mean()) * 12) < 5 / count**0.5


def test_noise_does_not_depend_on_sharding() -> None:
    device = torch.device("cpu")
    whole = hash_uniform((6, 10), 7, 0, device)
    assert torch.equal(hash_uniform((2, 10), 7, 40, device), whole[4:])


def test_unknown_stores_are_rejected() -> None:
    with pytest.raises(OptimizerError, match="store: expected one of fp32, bf16, int8.* got 'int4': did you"):
        state_codec("int4", "signed")
    with pytest.raises(OptimizerError, match="basis_store: expected one of fp32, bf16, int8, int4.* got 'fp8'"):
        state_codec("fp8", "basis")
