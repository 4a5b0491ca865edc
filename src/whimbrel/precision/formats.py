"""Number formats of stored weights: codes of few bits, and a scale for each row or for each group inside a row.

A weight w of a group whose largest magnitude is a becomes the code c and comes back as w':
    s = a / n;   c = round(w / s);   w' = c s          n = 127.5 (int8), 7.5 (int4), 448 (fp8, where c is a float8)
Rows never share anything, so a weight can be cut, joined and shared out by rows, codes and scales alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from whimbrel.base.errors import PrecisionError
from whimbrel.config import not_one_of
from whimbrel.ops.lowbit import FP8, INT4, INT8, SymmetricCodec, quantize_tokens_affine

__all__ = ["FORMATS", "WeightFormat", "code_tokens", "weight_format"]

CODE_TYPES = {code_type.name: code_type for code_type in (INT8, INT4, FP8)}
SMALLER_GROUPS = (64, 32)
"""Groups for weights whose columns a larger one does not divide, such as the 576 of SmolLM2 135M by 128."""
CODECS = {
    (name, group): SymmetricCodec(code_type, group)
    for name, code_type in CODE_TYPES.items()
    for group in (None, 128, *SMALLER_GROUPS)
}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is stored, and what the inputs of a product with it are rounded to."""

    name: str
    codes: Literal["int8", "int4", "fp8"]
    group: int | None = None
    """Columns that share a scale; None: the whole row. A weight that it does not divide gets a smaller one."""
    activations: Literal["int8", "int8-asymmetric", "fp8"] | None = None
    """What each token is rounded to, with scales of its own; None: nothing."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that holds the codes: those of int4 lie two in a byte, the even column in the low half."""
        return CODE_TYPES[self.codes].dtype

    @property
    def multiple(self) -> int:
        """What the number of columns must divide by."""
        return self.group or {"int8": 1, "int4": 2, "fp8": 16}[self.codes]

    def fitted(self, shape: torch.Size | tuple[int, ...]) -> WeightFormat:
        """This format for a weight of `shape`: where its group does not divide the columns, with a smaller one."""
        if self.group is None or len(shape) != 2 or shape[1] % self.group == 0:
            return self
        group = next((size for size in SMALLER_GROUPS if size < self.group and shape[1] % size == 0), None)
        return self if group is None else replace(self, group=group)

    def unfit(self, shape: torch.Size | tuple[int, ...]) -> str | None:
        """Why a weight of this shape cannot have this format; None where it can."""
        if len(shape) != 2:
            return f"it has {len(shape)} dimensions and {self.name} is for matrices"
        if shape[1] % self.fitted(shape).multiple:
            least = self.multiple if self.group is None else min(self.group, *SMALLER_GROUPS)
            return f"its {shape[1]} columns are not a multiple of {least}, as {self.name} wants them"
        if self.codes == "fp8" and shape[0] % 16:
            return f"its {shape[0]} rows are not a multiple of 16, as {self.name} wants them"
        if self.activations == "int8" and (shape[0] % 8 or shape[1] % 8):
            return f"its shape {tuple(shape)} is no multiple of 8, as {self.name} wants it"
        return None

    def parts(self, shape: torch.Size | tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of codes and of scales for a weight of this shape."""
        rows, columns = shape
        return (rows, columns // 2 if self.codes == "int4" else columns), (rows, columns // (self.group or columns))

    def shape_of(self, codes: Tensor) -> tuple[int, int]:
        """The shape of the weight that these are the codes of."""
        rows, columns = codes.shape
        return rows, columns * 2 if self.codes == "int4" else columns

    @property
    def codec(self) -> SymmetricCodec:
        """Codes and scales to weights and back."""
        # From a table: torch.compile traces dictionary lookups, not the construction of a codec.
        return CODECS.get((self.codes, self.group)) or SymmetricCodec(CODE_TYPES[self.codes], self.group)

    def encode(
        self, weight: Tensor, *, scales: Tensor | None = None, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Codes and scales; see `SymmetricCodec.encode`."""
        return self.codec.encode(weight, scales=scales, noise=noise)

    def whole(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """One number for each code, not scaled yet."""
        return CODE_TYPES[self.codes].decode(codes, dtype)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The weight, in the dtype of the scales."""
        return self.codec.decode(codes, scales, scales.dtype)


FORMATS = {
    form.name: form
    for form in (
        WeightFormat("int8", "int8"),
        WeightFormat("int8-dynamic", "int8", activations="int8"),
        WeightFormat("int4", "int4", group=128),
        WeightFormat("fp8", "fp8", activations="fp8"),
        WeightFormat("int8-dynamic-act-int4-weight", "int4", group=32, activations="int8-asymmetric"),
    )
}
"""Every format by its name."""


def weight_format(name: str | WeightFormat) -> WeightFormat:
    """The format of this name."""
    if isinstance(name, WeightFormat):
        return name
    if name not in FORMATS:
        raise PrecisionError(not_one_of("weights", name, FORMATS))
    return FORMATS[name]


def code_tokens(x: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round each token, a row of `x`, to codes: them, their scales, and for the asymmetric kind the code of zero."""
    if kind == "int8-asymmetric":
        return quantize_tokens_affine(x)
    return *CODECS[kind, None].encode(x.float()), None
