"""How the numbers of a cache are stored: as they are, or as codes of 8 or 4 bits.

A group of neighbouring numbers of one head of one token, the largest of magnitude a, is stored by itself:
    s = a / n;   c = round(x / s);   x' = c s          n = 448 (fp8, where c is a float8), 127 (int8), 7 (int4)
No group knows of another, so a token is coded once, its bytes never change, and a late outlier clips nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from whimbrel.base.errors import CacheError, ConfigError

__all__ = ["CODECS", "Codec", "find_codec"]

SCALE_DTYPE = torch.bfloat16
"""Has the range of fp32, and its rounding moves a code by less than half a step."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Numbers (..., head size) to codes (..., code width) and scales (..., groups), and back."""

    name: str
    largest: float = 0.0
    """The largest code."""
    group: int = 0
    """How many numbers share a scale; the last group of a head may be shorter."""
    code_dtype: torch.dtype | None = None
    """Of the tensor that holds the codes; None: the dtype of the numbers, which are stored as they are."""
    per_byte: int = 1
    """How many codes lie in one element, the first in the low bits."""

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
        """How many scales `size` numbers have."""
        return 0 if self.is_plain else -(-size // self.group)

    def encode(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of numbers (..., head size); numbers that are not finite spoil their own group alone."""
        if self.is_plain:
            return states, states.new_empty((*states.shape[:-1], 0))
        if not states.is_floating_point():
            raise CacheError(f"{self.name} codes numbers with a point and was given {states.dtype}: convert them")
        size = states.size(-1)
        self.code_width(size)
        grouped = _in_groups(states.float(), self.group)
        scales = (grouped.abs().amax(dim=-1) / self.largest).to(SCALE_DTYPE)
        steps = torch.where(scales == 0, 1, scales).float()
        ratios = (grouped / steps.unsqueeze(-1)).flatten(-2)[..., :size]
        return self._pack(ratios.clamp(-self.largest, self.largest)), scales

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of `codes`, in `dtype`."""
        if self.is_plain:
            return codes.to(dtype)
        numbers = self._unpack(codes)
        grouped = _in_groups(numbers, self.group) * scales.float().unsqueeze(-1)
        return grouped.flatten(-2)[..., : numbers.size(-1)].to(dtype)

    def _pack(self, ratios: Tensor) -> Tensor:
        if self.name == "fp8":
            return ratios.to(torch.float8_e4m3fn).view(torch.uint8)  # plain bytes: not every operation knows float8
        codes = ratios.round().to(torch.int8)
        if self.name == "int8":
            return codes
        codes = codes.view(torch.uint8)
        return (codes[..., ::2] & 15) | (codes[..., 1::2] << 4)

    def _unpack(self, codes: Tensor) -> Tensor:
        if self.name == "fp8":
            return codes.view(torch.float8_e4m3fn).float()
        if self.name == "int8":
            return codes.float()
        high = codes.view(torch.int8) >> 4  # keeps the sign
        low = (codes << 4).view(torch.int8) >> 4
        return torch.stack((low, high), dim=-1).flatten(-2).float()


CODECS = {
    codec.name: codec
    for codec in (
        Codec("none"),
        Codec("fp8", largest=448, group=64, code_dtype=torch.uint8),
        Codec("int8", largest=127, group=64, code_dtype=torch.int8),
        Codec("int4", largest=7, group=32, code_dtype=torch.uint8, per_byte=2),
    )
}
"""Every way to store numbers, by name."""


def find_codec(name: str) -> Codec:
    """The codec of that name."""
    if name not in CODECS:
        raise ConfigError(f"codec = {name!r} is not known: give one of {', '.join(CODECS)}")
    return CODECS[name]


def _in_groups(numbers: Tensor, group: int) -> Tensor:
    """(..., size) as (..., groups, group), zeros after the last number."""
    size = numbers.size(-1)
    group = min(group, size)
    if size % group:
        numbers = F.pad(numbers, (0, -size % group))
    return numbers.view(*numbers.shape[:-1], -(-size // group), group)
