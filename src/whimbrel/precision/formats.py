"""Formats of quantized weights: low-bit codes with one scale per row, or per group of columns of a row.

    s = max|w| / n;   c = round(w / s);   w' = c s      n = 127.5 (int8), 7.5 (int4), 448 (fp8, where c is a float8)

Rows are independent, so a weight can be sliced, concatenated and sharded by rows, codes and scales alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from whimbrel.base.errors import PrecisionError
from whimbrel.config import not_one_of
from whimbrel.ops.lowbit import FP8, INT4, INT8, SymmetricCodec, quantize_tokens_affine

__all__ = ["FORMATS", "WeightFormat", "find_format", "quantize_tokens"]

Shape = torch.Size | tuple[int, ...]
CODE_TYPES = {code_type.name: code_type for code_type in (INT8, INT4, FP8)}
SMALLER_GROUPS = (64, 32)
"""Fallback group sizes if the preferred one does not divide the number of columns (SmolLM2 135M: 576 by 128)."""
CODECS = {
    (name, group_size): SymmetricCodec(code_type, group_size)
    for name, code_type in CODE_TYPES.items()
    for group_size in (None, 128, *SMALLER_GROUPS)
}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a weight matrix is stored, and how the activations it is multiplied with are quantized."""

    name: str
    codes: Literal["int8", "int4", "fp8"]
    group_size: int | None = None
    """Columns that share a scale; None: the whole row. Reduced if it does not divide the number of columns."""
    activations: Literal["int8", "int8-asymmetric", "fp8"] | None = None
    """Dynamic quantization of activations, per token; None: not quantized."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor of codes. int4 packs two codes in a byte, the even column in the low half."""
        return CODE_TYPES[self.codes].dtype

    @property
    def codec(self) -> SymmetricCodec:
        """Converts between weights and codes."""
        # From a table: torch.compile traces dictionary lookups, not the construction of a codec.
        return CODECS.get((self.codes, self.group_size)) or SymmetricCodec(CODE_TYPES[self.codes], self.group_size)

    def fit_to(self, shape: Shape) -> WeightFormat:
        """This format with a group size that divides the columns of a weight of `shape`, if there is one."""
        if self.group_size is None or len(shape) != 2 or shape[1] % self.group_size == 0:
            return self
        smaller = (size for size in SMALLER_GROUPS if size < self.group_size and shape[1] % size == 0)
        return replace(self, group_size=next(smaller, self.group_size))

    def unsupported_reason(self, shape: Shape) -> str | None:
        """Why a weight of this shape cannot have this format; None if it can."""
        if len(shape) != 2:
            return f"{self.name} expects a matrix, got {len(shape)} dimensions"
        multiple = self.fit_to(shape).group_size or {"int8": 1, "int4": 2, "fp8": 16}[self.codes]
        if shape[1] % multiple:
            smallest = multiple if self.group_size is None else min(self.group_size, *SMALLER_GROUPS)
            return f"{self.name} expects the number of columns to be a multiple of {smallest}, got {shape[1]}"
        if self.codes == "fp8" and shape[0] % 16:
            return f"{self.name} expects the number of rows to be a multiple of 16, got {shape[0]}"
        if self.activations == "int8" and (shape[0] % 8 or shape[1] % 8):
            return f"{self.name} expects multiples of 8 rows and columns, got {tuple(shape)}"
        return None

    def part_shapes(self, shape: Shape) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of codes and scales of a weight of this shape."""
        rows, columns = shape
        return (rows, CODE_TYPES[self.codes].width(columns)), (rows, columns // (self.group_size or columns))

    def weight_shape(self, codes: Tensor) -> tuple[int, int]:
        """Shape of the weight with these codes."""
        rows, columns = codes.shape
        return rows, columns * 2 if self.codes == "int4" else columns

    def encode(
        self, weight: Tensor, *, scales: Tensor | None = None, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Codes and scales; see `SymmetricCodec.encode`."""
        return self.codec.encode(weight, scales=scales, noise=noise)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The weight, in the dtype of the scales."""
        return self.codec.decode(codes, scales, scales.dtype)

    def unpack(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The codes, one element each, unscaled."""
        return CODE_TYPES[self.codes].decode(codes, dtype)


FORMATS = {
    weight_format.name: weight_format
    for weight_format in (
        WeightFormat("int8", "int8"),
        WeightFormat("int8-dynamic", "int8", activations="int8"),
        WeightFormat("int4", "int4", group_size=128),
        WeightFormat("fp8", "fp8", activations="fp8"),
        WeightFormat("int8-dynamic-act-int4-weight", "int4", group_size=32, activations="int8-asymmetric"),
    )
}
"""The formats of quantized weights by name."""


def find_format(name: str | WeightFormat) -> WeightFormat:
    """A format by name. Raises PrecisionError, with a suggestion, for an unknown one."""
    if isinstance(name, WeightFormat):
        return name
    if name not in FORMATS:
        raise PrecisionError(not_one_of("weight_format", name, FORMATS))
    return FORMATS[name]


def quantize_tokens(x: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes and scale of each token (row of `x`), and for the asymmetric kind its zero point."""
    if kind == "int8-asymmetric":
        return quantize_tokens_affine(x)
    return *CODECS[kind, None].encode(x.float()), None
