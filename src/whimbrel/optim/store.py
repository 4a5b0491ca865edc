"""How an optimizer keeps numbers between steps: plain, in 16 bits, or as codes with one scale for each block of a row.

A block is up to 256 neighbours in one row, so codes and scales are cut alike where rows are shared out over machines.
A number x of a block whose largest is a becomes a code c out of n levels:  c = round(n sign(x) (|x|/a)^(1/p)).
p = 1 spaces the levels evenly (a basis); p = 2 keeps small first moments, p = 4 small second moments, which span many
orders of magnitude and whose roots divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from whimbrel.base.errors import OptimizerError

__all__ = ["BLOCK", "Codec", "CodedWeight", "Store", "add_rounded_", "codec", "round_to_bfloat16", "uniform"]

Store = Literal["fp32", "bf16", "int8", "int4"]
BLOCK = 256
"""Numbers that share a scale, at most."""
GOLDEN = 0x9E3779B1
"""2^32 divided by the golden ratio: multiples of it are spread evenly over 32 bits."""


@runtime_checkable
class CodedWeight(Protocol):
    """A parameter that is stored as codes, with scales by row, and is a tensor in all else."""

    def dequantize(self) -> Tensor:
        """Its numbers."""

    def store_(self, numbers: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Take on other numbers, rounded up or down by chance."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Numbers to stored tensors and back. `levels` is None where they are stored as they are, in `dtype`."""

    dtype: torch.dtype
    levels: int | None = None
    power: int = 1

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.levels == 7

    def allocate(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
        """Zeros of this shape as they are stored: the numbers, or codes and scales."""
        if self.levels is None:
            return (torch.zeros(*shape, dtype=self.dtype, device=device),)
        *rows, width = shape
        codes = torch.zeros(*rows, (width + 1) // 2 if self.packed else width, dtype=self.dtype, device=device)
        if self.packed:
            codes.fill_(_pack(torch.zeros(2, dtype=torch.uint8) + 8).item())  # 8 stands for zero
        return codes, torch.zeros(*rows, -(-width // BLOCK), dtype=torch.float32, device=device)

    def bytes_of(self, shape: Sequence[int]) -> int:
        """What `allocate` takes, by arithmetic alone."""
        rows, width = torch.Size(shape[:-1]).numel(), shape[-1] if shape else 1
        if self.levels is None:
            return rows * width * self.dtype.itemsize
        return rows * ((width + 1) // 2 if self.packed else width) + rows * -(-width // BLOCK) * 4

    def decode(self, stored: Sequence[Tensor], width: int) -> Tensor:
        """The numbers, in fp32; `width` is the length of a row. What is stored in fp32 is handed out itself."""
        if self.levels is None:
            return stored[0].float()
        codes, scales = stored
        if self.packed:
            codes = _unpack(codes)[..., :width].to(torch.int16) - 8
        x = _by_block_(codes.float(), _root(scales.clone(), self.power) / self.levels)
        if self.power == 2:
            x.mul_(x.abs())
        elif self.power == 4:
            x.square_().square_()
        return x

    def encode_(self, stored: Sequence[Tensor], numbers: Tensor, noise: Tensor | None = None) -> None:
        """Store `numbers`. With `noise`, uniform in [0, 1), they are rounded up as often as they should be.

        Codes up to `levels` need no bounds: rounded to the nearest, half a level is left for rounding errors, and noise
        ends 2^-16 below 1 (see `uniform`), so that 255 stays below 256 after a division that leaves 1 at most.
        """
        if self.levels is None:
            if stored[0] is not numbers:
                stored[0].copy_(numbers if noise is None else _cut_to_bfloat16(numbers, (noise * (1 << 16)).int()))
            return
        codes, scales = stored
        unsigned = codes.dtype == torch.uint8 and not self.packed
        share = numbers.clone() if unsigned else numbers.abs()
        scales.copy_(_largest(share))
        least = scales.clamp(min=torch.finfo(torch.float32).tiny)
        if noise is None:
            _by_block_(_root(share, self.power), self.levels / _root(least, self.power)).round_()
        else:
            _root(_by_block_(share, least, divide=True), self.power).mul_(self.levels).add_(noise).floor_()
        if not unsigned:
            share.copysign_(numbers)
        codes.copy_(_pack((share + 8).to(torch.uint8)) if self.packed else share)


def codec(store: str, kind: Literal["basis", "signed", "positive"]) -> Codec:
    """How a basis, or a moment of either or of one sign, is kept in a store."""
    if store in ("fp32", "bf16"):
        return Codec(torch.float32 if store == "fp32" else torch.bfloat16)
    if store == "int4" and kind == "basis":
        return Codec(torch.uint8, levels=7)
    if store == "int8":
        if kind == "positive":
            return Codec(torch.uint8, levels=255, power=4)
        return Codec(torch.int8, levels=127, power=1 if kind == "basis" else 2)
    allowed = "fp32, bf16, int8, int4" if kind == "basis" else "fp32, bf16, int8"
    raise OptimizerError(f"{'basis_store' if kind == 'basis' else 'store'} = {store!r} is not one of {allowed}")


def uniform(shape: Sequence[int], seed: int, start: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1), in steps of 2^-16: a hash of `seed` and of each element's index, which counts from `start`.

    For rounding, where a `torch.Generator` would take longer than the rest of a step: on a CPU it draws one number
    after the other. Elements keep their numbers however a tensor is cut or sharded. The hash is a multiplicative one
    with two rounds of xor-shift and multiplication, of which the high half is kept.
    """
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.int32, device=device)
    x.mul_(_signed(GOLDEN)).add_(_signed(start * GOLDEN + seed))
    shifted = torch.empty_like(x)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << 32 - shift) - 1)).mul_(_signed(factor))  # >> keeps the sign
    return x.bitwise_right_shift_(16).float().mul_(2**-16).add_(0.5).view(tuple(shape))


def _signed(number: int) -> int:
    """The int32 with the last 32 bits of a number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def add_rounded_(weight: Tensor, change: Tensor, generator: torch.Generator) -> None:
    """`weight += change`; of codes and of 16 bits, they are rounded by chance, so that small changes add up."""
    if isinstance(weight, CodedWeight):
        weight.store_(weight.dequantize().float().add_(change), generator)
    elif weight.dtype == torch.bfloat16:
        weight.copy_(round_to_bfloat16(weight.float().add_(change), generator))
    elif weight.dtype == torch.float16:
        weight.copy_(_round_to_float16(weight.float().add_(change), generator))
    else:
        weight.add_(change.to(weight.dtype))


def round_to_bfloat16(numbers: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """fp32 to one of the two nearest bf16, each as likely as it is near: the mean of many roundings is the number."""
    noise = torch.randint(0, 1 << 16, numbers.shape, dtype=torch.int32, device=numbers.device, generator=generator)
    return _cut_to_bfloat16(numbers, noise)


def _cut_to_bfloat16(numbers: Tensor, noise: Tensor) -> Tensor:
    """Add `noise` to the 16 bits that bf16 has not, and leave them out."""
    rounded = numbers.contiguous().view(torch.int32).add(noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(numbers.isfinite(), rounded, numbers).bfloat16()


def _round_to_float16(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to one of the two nearest fp16; a step between those is 2^(exponent - 10), and 2^-24 near zero."""
    step = torch.exp2(torch.frexp(numbers).exponent.clamp(min=-13).float() - 11)
    noise = torch.rand(numbers.shape, dtype=torch.float32, device=numbers.device, generator=generator)
    return ((numbers / step).add_(noise).floor_() * step).half()


def _by_block_(numbers: Tensor, scales: Tensor, *, divide: bool = False) -> Tensor:
    """Numbers times the scale of their block, or divided by it, in place."""
    width = numbers.shape[-1]
    block = min(BLOCK, width)
    blocks = numbers
    if width % block == 0:
        blocks, scales = numbers.unflatten(-1, (-1, block)), scales[..., None]
    else:
        scales = scales.repeat_interleave(block, dim=-1)[..., :width]
    blocks.div_(scales) if divide else blocks.mul_(scales)
    return numbers


def _root(numbers: Tensor, power: int) -> Tensor:
    """The square root or the fourth root, in place; with power 1 the numbers."""
    for _ in range(power // 2):
        numbers = numbers.sqrt_()
    return numbers


def _largest(magnitudes: Tensor) -> Tensor:
    """The largest magnitude of each block."""
    width = magnitudes.shape[-1]
    block = min(BLOCK, width)
    if short := -width % block:
        magnitudes = torch.nn.functional.pad(magnitudes, (0, short))
    largest: Tensor = magnitudes.unflatten(-1, (-1, block)).amax(dim=-1)
    return largest


def _pack(codes: Tensor) -> Tensor:
    """Pairs of codes below 16 in one byte each; an odd one out is paired with zero's code."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1), value=8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unpack(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
