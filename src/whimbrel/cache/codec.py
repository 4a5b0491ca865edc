"""How the numbers of a cache are stored: as they are, or as codes of 8 or 4 bits.

With 8 bits, a group of neighbouring numbers of one head of one token, the largest of magnitude a, has one scale:
    s = a / n;   c = round(x / s);   x' = c s          n = 448 (fp8, where c is a float8), 127 (int8)
With 4 bits that is not enough for keys: a few channels of a head are many times larger than the rest, and take all the
steps of their group. There a group is small, 8 numbers, and has a minimum beside its scale:
    c = round((x - m) / s);   x' = m + c s             c from 0 to 15
To be small as well, the minima and scales of the groups of a head are themselves codes of one byte, with one base and
two units in bf16 for all: m = base + m' u, s = s' v. Minima are rounded down and scales up: no number is clipped.

No head of a token knows of another, so a token is coded once, its bytes never change, and a late outlier clips nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, ConfigError

__all__ = ["CODECS", "Codec", "find_codec"]

SCALE_DTYPE = torch.bfloat16
"""Has the range of fp32, and its rounding moves a code by less than half a step."""
ROUNDED = 2.0**-8
"""More than bf16 rounds off: what is moved by it stays on that side of the number it was."""
BYTE = 255


@dataclass(frozen=True, slots=True)
class Codec:
    """Numbers (..., head size) to codes (..., code width) and scales (..., scale width), and back."""

    name: str
    largest: float = 0.0
    """The largest code."""
    group: int = 0
    """How many numbers share a scale; the last group of a head may be shorter."""
    code_dtype: torch.dtype | None = None
    """Of the tensor that holds the codes; None: the dtype of the numbers, which are stored as they are."""
    per_byte: int = 1
    """How many codes lie in one element, the first in the low bits."""
    has_minimum: bool = False
    """Whether a group has a minimum beside its scale, both codes of one byte."""

    @property
    def is_plain(self) -> bool:
        """Whether numbers are stored as they are, without scales."""
        return self.code_dtype is None

    def code_width(self, size: int) -> int:
        """How many elements hold the codes of `size` numbers."""
        if size % self.per_byte:
            raise ConfigError(f"a head size of {size} is odd and {self.name} stores codes in pairs: use int8 or fp8")
        return size // self.per_byte

    def groups(self, size: int) -> int:
        """How many groups `size` numbers have."""
        return 0 if self.is_plain else -(-size // self.group)

    def scale_width(self, size: int) -> int:
        """Number of elements that store the scales of `size` values."""
        groups = self.groups(size)
        return 2 * groups + 3 * SCALE_DTYPE.itemsize if self.has_minimum else groups

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of the tensor that holds the scales."""
        return torch.uint8 if self.has_minimum else SCALE_DTYPE

    def encode(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of numbers (..., head size).

        Numbers that are not finite spoil their own group, and with 4 bits their own head.
        """
        if self.is_plain:
            return states, states.new_empty((*states.shape[:-1], 0))
        if not states.is_floating_point():
            raise CacheError(f"{self.name} codes numbers with a point and was given {states.dtype}: convert them")
        size = states.size(-1)
        self.code_width(size)
        grouped = _in_groups(states.float(), self.group)
        if self.has_minimum:
            minima, steps, scales = _encode_minima(grouped, self.largest)
            ratios = ((grouped - minima) / torch.where(steps == 0, 1, steps)).flatten(-2)[..., :size]
            return self._pack(ratios.clamp(0, self.largest)), scales
        scales = (grouped.abs().amax(dim=-1) / self.largest).to(SCALE_DTYPE)
        steps = torch.where(scales == 0, 1, scales).float()
        ratios = (grouped / steps.unsqueeze(-1)).flatten(-2)[..., :size]
        return self._pack(ratios.clamp(-self.largest, self.largest)), scales

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of `codes`, in `dtype`."""
        if self.is_plain:
            return codes.to(dtype)
        numbers = self._unpack(codes)
        grouped = _in_groups(numbers, self.group)
        if self.has_minimum:
            minima, steps = _decode_minima(scales)
            grouped = torch.addcmul(minima, grouped, steps)
        else:
            grouped = grouped * scales.float().unsqueeze(-1)
        return grouped.flatten(-2)[..., : numbers.size(-1)].to(dtype)

    def _pack(self, ratios: Tensor) -> Tensor:
        if self.name == "fp8":
            return ratios.to(torch.float8_e4m3fn).view(torch.uint8)  # plain bytes: not every operation knows float8
        if self.name == "int8":
            return ratios.round().to(torch.int8)
        codes = ratios.round().to(torch.uint8)
        return codes[..., ::2] | (codes[..., 1::2] << 4)

    def _unpack(self, codes: Tensor) -> Tensor:
        if self.name == "fp8":
            return codes.view(torch.float8_e4m3fn).float()
        if self.name == "int8":
            return codes.float()
        return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).float()


CODECS = {
    codec.name: codec
    for codec in (
        Codec("none"),
        Codec("fp8", largest=448, group=64, code_dtype=torch.uint8),
        Codec("int8", largest=127, group=64, code_dtype=torch.int8),
        Codec("int4", largest=15, group=8, code_dtype=torch.uint8, per_byte=2, has_minimum=True),
    )
}
"""Every way to store numbers, by name."""


def find_codec(name: str) -> Codec:
    """The codec of that name."""
    if name not in CODECS:
        raise ConfigError(f"codec = {name!r} is not known: give one of {', '.join(CODECS)}")
    return CODECS[name]


def _in_groups(numbers: Tensor, group: int) -> Tensor:
    """(..., size) as (..., groups, group), the last number repeated to fill its group."""
    size = numbers.size(-1)
    group = min(group, size)
    if size % group:
        numbers = torch.cat((numbers, numbers[..., -1:].expand(*numbers.shape[:-1], -size % group)), dim=-1)
    return numbers.view(*numbers.shape[:-1], -(-size // group), group)


def _encode_minima(grouped: Tensor, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """Minimum and step of each group (..., groups, 1) as they will be decoded, and the bytes of both."""
    low, high = grouped.aminmax(dim=-1)
    base = low.amin(dim=-1, keepdim=True)
    base = _stored(base - base.abs() * ROUNDED)
    minimum_unit = _stored((low - base).amax(dim=-1, keepdim=True) * (1 + ROUNDED) / BYTE)
    minimum_codes = ((low - base) / torch.where(minimum_unit == 0, 1, minimum_unit)).floor().clamp(0, BYTE)
    above = (high - (base + minimum_codes * minimum_unit)).clamp(min=0) / largest
    step_unit = _stored(above.amax(dim=-1, keepdim=True) * (1 + ROUNDED) / BYTE)
    step_codes = (above / torch.where(step_unit == 0, 1, step_unit)).ceil().clamp(0, BYTE)
    shared = torch.cat((base, minimum_unit, step_unit), dim=-1).to(SCALE_DTYPE).view(torch.uint8)
    scales = torch.cat((minimum_codes.to(torch.uint8), step_codes.to(torch.uint8), shared), dim=-1)
    return *_decode_minima(scales), scales


def _decode_minima(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and step of each group, (..., groups, 1), of their bytes."""
    width = 3 * SCALE_DTYPE.itemsize
    minimum_codes, step_codes = scales[..., :-width].float().chunk(2, dim=-1)
    base, minimum_unit, step_unit = scales[..., -width:].contiguous().view(SCALE_DTYPE).float().split(1, dim=-1)
    return (base + minimum_codes * minimum_unit).unsqueeze(-1), (step_codes * step_unit).unsqueeze(-1)


def _stored(numbers: Tensor) -> Tensor:
    """`numbers` as they come back from `SCALE_DTYPE`."""
    return numbers.to(SCALE_DTYPE).float()
