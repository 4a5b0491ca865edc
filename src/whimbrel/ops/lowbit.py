"""Low-bit codecs: tensors stored as int8, int4 or fp8 codes with one scale per group of neighboring values.

Groups lie within the last dimension, so codes and scales can be sliced, sharded and concatenated along all others.
Three scale rules, each bit-exact, because checkpoints and resumed runs depend on it:

    SymmetricCodec  x' = c s          weights, and int8/fp8 KV caches
    AffineCodec     x' = m + c s      int4 KV caches, whose keys have outlier channels
    PowerCodec      x' = a (c/n)^p    optimizer state, which spans many orders of magnitude

`FloatCodec` has the interface of `PowerCodec` and stores fp32 or bf16. Stochastic rounding rounds up with a probability
equal to the distance from the lower neighbor, so the mean of many roundings is the value itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whimbrel.base.errors import ConfigError

__all__ = [
    "BLOCK_SIZE",
    "FP8",
    "INT4",
    "INT8",
    "UINT8",
    "AffineCodec",
    "CodeType",
    "FloatCodec",
    "GroupCodec",
    "PowerCodec",
    "SymmetricCodec",
    "hash_uniform",
    "pack_nibbles",
    "quantize_tokens_affine",
    "scale_groups_",
    "split_groups",
    "stochastic_round",
    "unpack_nibbles",
]

BLOCK_SIZE = 256
"""Group size of `PowerCodec`."""
BF16_MARGIN = 2.0**-8
"""Larger than the relative rounding error of bf16, so a value shifted by it stays on that side when rounded."""
MAX_BYTE = 255
HEADROOM, MIN_FILL = 1.05, 0.5
"""For `update_scales`: headroom above the maximum in a new scale, and the used range below which it shrinks."""
GOLDEN = 0x9E3779B1
"""2^32 / golden ratio: its multiples are spread evenly over 32 bits (Fibonacci hashing)."""


# Codes


@dataclass(frozen=True, slots=True)
class CodeType:
    """Value range and storage dtype of one kind of code."""

    name: str
    min: float
    max: float
    dtype: torch.dtype
    """Storage dtype. fp8 codes may be stored as uint8, for operations that float8 tensors lack."""
    zero_point: int = 0
    """Added to codes before they are packed, to make them unsigned."""
    packed: bool = False
    """Whether two codes share a byte."""

    def width(self, size: int) -> int:
        """Number of stored elements for `size` codes."""
        return (size + 1) // 2 if self.packed else size

    def encode_(self, ratios: Tensor, noise: Tensor | None = None) -> Tensor:
        """Round scaled values to codes and pack them; overwrites `ratios`.

        With `noise`, uniform in [0, 1), integers are rounded stochastically; fp8 always rounds to nearest.
        """
        if self.name == "fp8":
            return ratios.clamp_(self.min, self.max).to(torch.float8_e4m3fn).view(self.dtype)
        rounded = ratios.round_() if noise is None else ratios.add_(noise).floor_()
        return self.pack(rounded.clamp_(self.min, self.max))

    def pack(self, codes: Tensor) -> Tensor:
        """Convert codes (integers in a float tensor) to the storage layout."""
        if not self.packed:
            return codes.to(self.dtype)
        unsigned = (codes + self.zero_point if self.zero_point else codes).to(torch.uint8)
        return pack_nibbles(unsigned, fill=self.zero_point)

    def decode(self, codes: Tensor, dtype: torch.dtype, *, width: int | None = None) -> Tensor:
        """Unpacked codes, one element each, unscaled; `width` drops the padding of an odd width."""
        if self.name == "fp8":
            return codes.view(torch.float8_e4m3fn).to(dtype)
        if self.packed:
            codes = unpack_nibbles(codes)[..., :width]
            if self.zero_point:
                codes = codes.to(torch.int8) - self.zero_point
        return codes.to(dtype)


INT8 = CodeType("int8", -128, 127, torch.int8)
UINT8 = CodeType("uint8", 0, 255, torch.uint8)
INT4 = CodeType("int4", -8, 7, torch.uint8, zero_point=8, packed=True)
FP8 = CodeType("fp8", -448, 448, torch.float8_e4m3fn)


def pack_nibbles(codes: Tensor, *, fill: int = 0) -> Tensor:
    """Pack pairs of 4-bit codes along the last dimension into bytes, the even one in the low nibble.

    `fill` pads an odd width.
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1), value=fill)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`, including the padding of an odd width."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


# Groups


def split_groups(x: Tensor, group_size: int | None) -> Tensor:
    """(..., width) as (..., groups, group size); None: one group. A short last group is padded with its last value."""
    width = x.shape[-1]
    size = min(group_size or width, width)
    if width % size:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], -width % size)), dim=-1)
    groups: Tensor = x.unflatten(-1, (-1, size))
    return groups


def scale_groups_(x: Tensor, scales: Tensor, group_size: int | None, *, divide: bool = False) -> Tensor:
    """Multiply (or divide) each group of `x` (..., width) by its scale (..., groups), in place."""
    width = x.shape[-1]
    size = min(group_size or width, width)
    groups = x
    if width % size == 0:
        groups, scales = x.unflatten(-1, (-1, size)), scales.unsqueeze(-1)
    else:
        scales = scales.repeat_interleave(size, dim=-1)[..., :width]
    groups.div_(scales) if divide else groups.mul_(scales)
    return x


# Codecs for weights and KV caches


@dataclass(frozen=True, slots=True)
class GroupCodec(ABC):
    """Floats (..., size) to codes (..., code width) and scales (..., scale width), and back."""

    code_type: CodeType
    group_size: int | None = None
    """Values that share a scale; None: the complete last dimension."""
    scale_dtype: torch.dtype | None = None
    """Dtype of the tensor of scales; None: the input's dtype."""

    @property
    def name(self) -> str:
        """int8, int4 or fp8."""
        return self.code_type.name

    @property
    def code_dtype(self) -> torch.dtype:
        """Dtype of the tensor of codes."""
        return self.code_type.dtype

    def code_width(self, size: int) -> int:
        """Elements that store the codes of `size` values."""
        if self.code_type.packed and size % 2:
            raise ConfigError(f"{self.name}: expected an even number of values, got {size}: use int8 or fp8")
        return self.code_type.width(size)

    def num_groups(self, size: int) -> int:
        """Number of groups in `size` values; the last one may be shorter."""
        return 1 if self.group_size is None else -(-size // self.group_size)

    def scale_width(self, size: int) -> int:
        """Elements that store the scales of `size` values."""
        return self.num_groups(size)

    @abstractmethod
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales. A non-finite value corrupts its group; with `AffineCodec`, all groups."""

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of codes, in `dtype`."""


@dataclass(frozen=True, slots=True)
class SymmetricCodec(GroupCodec):
    """One scale per group: s = max|x| / n, c = round(x / s), n = half the range of codes (127.5 for INT8).

    Without `scale_dtype` (weights; as torchao computes them) scales have the dtype of `x`, are at least its smallest
    normal number, and decoding computes in it. With `scale_dtype` (KV caches) a group of zeros has scale 0, and
    decoding computes in fp32.
    """

    def encode(self, x: Tensor, *, scales: Tensor | None = None, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes and scales; `scales` default to max|x| / n. `noise`: see `CodeType.encode_`."""
        width = x.shape[-1]
        self.code_width(width)
        groups = split_groups(x.float(), self.group_size)
        if scales is None:
            max_scales = groups.abs().amax(dim=-1) / ((self.code_type.max - self.code_type.min) / 2)
            if self.scale_dtype is None:
                scales = _at_least_normal(max_scales, x.dtype)
            else:
                scales = max_scales.to(self.scale_dtype)
        if self.scale_dtype is None:
            ratios = groups * (1.0 / scales.float()).unsqueeze(-1)
        else:
            ratios = groups / torch.where(scales == 0, 1, scales).float().unsqueeze(-1)
        return self.code_type.encode_(ratios.flatten(-2)[..., :width], noise), scales

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of codes, in `dtype`."""
        if self.scale_dtype is not None:
            scales = scales.float()
        values = self.code_type.decode(codes, scales.dtype)
        return scale_groups_(values, scales, self.group_size).to(dtype)

    def update_scales(self, scales: Tensor, x: Tensor) -> Tensor:
        """Scales for a weight that changes little from step to step: the old ones, as long as `x` fits them.

        A new scale re-rounds every code of its group, and stochastic rounding would change weights that the step did
        not. New scales have some headroom, so that they are rarely needed, and never clip.
        """
        largest = split_groups(x.float(), self.group_size).abs().amax(dim=-1)
        full = self.code_type.max * scales.float()
        fits = (largest <= full) & (largest >= MIN_FILL * full)
        return torch.where(fits, scales, _at_least_normal(largest * HEADROOM / self.code_type.max, scales.dtype))


@dataclass(frozen=True, slots=True)
class AffineCodec(GroupCodec):
    """Minimum and step per group, c = round((x - m) / s), with both double-quantized to keep small groups cheap.

    Minima and steps are one byte each; all groups share a base and two units in bf16: m = base + m' u, s = s' v.
    Minima are rounded down and steps up, so nothing is clipped. Scales are bytes: minima, steps, base, u, v.
    """

    def scale_width(self, size: int) -> int:
        """Elements that store the scales of `size` values."""
        return 2 * self.num_groups(size) + 3 * torch.bfloat16.itemsize

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales; a non-finite value corrupts all groups."""
        width = x.shape[-1]
        self.code_width(width)
        groups = split_groups(x.float(), self.group_size)
        scales = self._scales(groups)
        minima, steps = self._minima_and_steps(scales)
        ratios = ((groups - minima) / torch.where(steps == 0, 1, steps)).flatten(-2)[..., :width]
        return self.code_type.encode_(ratios), scales

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of codes, in `dtype`."""
        values = self.code_type.decode(codes, torch.float32)
        minima, steps = self._minima_and_steps(scales)
        groups = torch.addcmul(minima, split_groups(values, self.group_size), steps)
        return groups.flatten(-2)[..., : values.shape[-1]].to(dtype)

    def _scales(self, groups: Tensor) -> Tensor:
        low, high = groups.aminmax(dim=-1)
        base = low.amin(dim=-1, keepdim=True)
        base = _as_bf16(base - base.abs() * BF16_MARGIN)
        minimum_unit = _as_bf16((low - base).amax(dim=-1, keepdim=True) * (1 + BF16_MARGIN) / MAX_BYTE)
        minimum_codes = ((low - base) / torch.where(minimum_unit == 0, 1, minimum_unit)).floor().clamp(0, MAX_BYTE)
        ranges = (high - (base + minimum_codes * minimum_unit)).clamp(min=0) / self.code_type.max
        step_unit = _as_bf16(ranges.amax(dim=-1, keepdim=True) * (1 + BF16_MARGIN) / MAX_BYTE)
        step_codes = (ranges / torch.where(step_unit == 0, 1, step_unit)).ceil().clamp(0, MAX_BYTE)
        shared = torch.cat((base, minimum_unit, step_unit), dim=-1).to(torch.bfloat16).view(torch.uint8)
        return torch.cat((minimum_codes.to(torch.uint8), step_codes.to(torch.uint8), shared), dim=-1)

    @staticmethod
    def _minima_and_steps(scales: Tensor) -> tuple[Tensor, Tensor]:
        """(..., groups, 1) each."""
        shared = 3 * torch.bfloat16.itemsize
        minimum_codes, step_codes = scales[..., :-shared].float().chunk(2, dim=-1)
        floats = scales[..., -shared:].contiguous().view(torch.bfloat16).float()
        base, minimum_unit, step_unit = floats.split(1, dim=-1)
        return (base + minimum_codes * minimum_unit).unsqueeze(-1), (step_codes * step_unit).unsqueeze(-1)


def quantize_tokens_affine(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 codes of each token (row of `x`), with its scale and zero point: x = (codes - zero_point) scale."""
    values = x.float()
    low, high = values.amin(dim=-1, keepdim=True).clamp(max=0), values.amax(dim=-1, keepdim=True).clamp(min=0)
    scales = ((high - low) / 255.0).clamp(min=torch.finfo(x.dtype).smallest_normal)
    zero_points = (-128 - (low / scales).round()).clamp(-128, 127)
    codes = ((values * (1.0 / scales)).round() + zero_points).clamp(-128, 127)
    return codes.to(torch.int8), scales, zero_points


def _at_least_normal(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return scales.clamp(min=torch.finfo(dtype).smallest_normal).to(dtype)


def _as_bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


# Codecs for optimizer state, which is rewritten in place at every step


@dataclass(frozen=True, slots=True)
class FloatCodec:
    """State stored as fp32, or as bf16 with stochastic rounding."""

    dtype: torch.dtype

    def allocate(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
        """Allocate the storage of an all-zero state."""
        return (torch.zeros(*shape, dtype=self.dtype, device=device),)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that `allocate` takes."""
        return torch.Size(shape).numel() * self.dtype.itemsize

    def decode(self, stored: Sequence[Tensor], width: int) -> Tensor:
        """The state in fp32; if stored as fp32, the stored tensor itself, not a copy."""
        return stored[0].float()

    def encode_(self, stored: Sequence[Tensor], values: Tensor, noise: Tensor | None = None) -> None:
        """Overwrite `stored`. With `noise`, uniform in [0, 1), bf16 is rounded stochastically."""
        if stored[0] is not values:
            stored[0].copy_(values if noise is None else _truncate_to_bf16(values, (noise * (1 << 16)).int()))


@dataclass(frozen=True, slots=True)
class PowerCodec:
    """Companded codes, one fp32 scale per block of 256: c = round(n sign(x) (|x| / max|x|)^(1/p)), n = largest code.

    p = 1 spaces the levels evenly (projection bases); p = 2 resolves small first moments and p = 4 small second
    moments, which span many orders of magnitude and whose roots divide the update. The stored scale is max|x|.
    """

    code_type: CodeType
    power: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor of codes."""
        return self.code_type.dtype

    def allocate(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
        """Allocate the storage of an all-zero state: codes and scales."""
        *rows, width = shape
        codes = torch.zeros(*rows, self.code_type.width(width), dtype=self.dtype, device=device)
        if self.code_type.packed:
            codes.fill_(self.code_type.zero_point | self.code_type.zero_point << 4)
        return codes, torch.zeros(*rows, -(-width // BLOCK_SIZE), dtype=torch.float32, device=device)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that `allocate` takes."""
        rows, width = torch.Size(shape[:-1]).numel(), shape[-1] if shape else 1
        return rows * self.code_type.width(width) * self.dtype.itemsize + rows * -(-width // BLOCK_SIZE) * 4

    def decode(self, stored: Sequence[Tensor], width: int) -> Tensor:
        """The state in fp32; `width` is its last dimension, which packed codes do not determine."""
        codes, scales = stored
        values = self.code_type.decode(codes, torch.float32, width=width)
        scale_groups_(values, self._root_(scales.clone()) / self.code_type.max, BLOCK_SIZE)
        if self.power == 2:
            values.mul_(values.abs())
        elif self.power == 4:
            values.square_().square_()
        return values

    def encode_(self, stored: Sequence[Tensor], values: Tensor, noise: Tensor | None = None) -> None:
        """Overwrite `stored`. With `noise`, uniform in [0, 1), magnitudes are rounded stochastically.

        Codes need no clamping: rounding to nearest leaves half a level for floating-point error, and noise ends 2^-16
        below 1 (see `hash_uniform`), so that 255 stays below 256 after a division whose result is at most 1.
        """
        codes, scales = stored
        signed = self.code_type.min < 0
        ratios = values.abs() if signed else values.clone()
        scales.copy_(split_groups(ratios, BLOCK_SIZE).amax(dim=-1))
        divisors = scales.clamp(min=torch.finfo(torch.float32).tiny)
        if noise is None:
            scale_groups_(self._root_(ratios), self.code_type.max / self._root_(divisors), BLOCK_SIZE).round_()
        else:
            scale_groups_(ratios, divisors, BLOCK_SIZE, divide=True)
            self._root_(ratios).mul_(self.code_type.max).add_(noise).floor_()
        if signed:
            ratios.copysign_(values)
        codes.copy_(self.code_type.pack(ratios) if self.code_type.packed else ratios)

    def _root_(self, x: Tensor) -> Tensor:
        """The square root (p = 2) or fourth root (p = 4), in place."""
        for _ in range(self.power // 2):
            x = x.sqrt_()
        return x


# Stochastic rounding


def hash_uniform(shape: Sequence[int], seed: int, start: int, device: torch.device) -> Tensor:
    """Uniform noise in [0, 1), in steps of 2^-16: a hash of `seed` and the index of each element, counted from `start`.

    Much faster than a `torch.Generator` on a CPU, which is sequential, and independent of how a tensor is sharded.
    The hash is multiplicative, with two rounds of xor-shift and multiply, of which the high 16 bits are used.
    """
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.int32, device=device)
    x.mul_(_wrap_int32(GOLDEN)).add_(_wrap_int32(start * GOLDEN + seed))
    shifted = torch.empty_like(x)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        torch.bitwise_right_shift(x, shift, out=shifted)  # arithmetic shift: mask the copies of the sign bit
        x.bitwise_xor_(shifted.bitwise_and_((1 << 32 - shift) - 1)).mul_(_wrap_int32(factor))
    return x.bitwise_right_shift_(16).float().mul_(2**-16).add_(0.5).view(tuple(shape))


def stochastic_round(x: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None) -> Tensor:
    """Round fp32 to bf16 or fp16 stochastically: to one of the two neighboring values."""
    if dtype == torch.bfloat16:
        noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
        return _truncate_to_bf16(x, noise)
    if dtype != torch.float16:
        raise ValueError(f"stochastic_round: expected bfloat16 or float16, got {dtype}")
    # The spacing of fp16 is 2^(exponent - 10), and 2^-24 for subnormal numbers.
    step = torch.exp2(torch.frexp(x).exponent.clamp(min=-13).float() - 11)
    uniform = torch.rand(x.shape, dtype=torch.float32, device=x.device, generator=generator)
    return ((x / step).add_(uniform).floor_() * step).half()


def _truncate_to_bf16(x: Tensor, noise: Tensor) -> Tensor:
    """Add `noise`, an int32 below 2^16, to the mantissa bits that bf16 lacks, then truncate them."""
    rounded = x.contiguous().view(torch.int32).add(noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def _wrap_int32(number: int) -> int:
    """A Python integer modulo 2^32, as a signed int32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
