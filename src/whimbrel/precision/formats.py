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

__all__ = ["FORMATS", "FP8", "WeightFormat", "code_tokens", "weight_format"]

FP8 = torch.float8_e4m3fn
LIMITS = {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0), "fp8": (-448.0, 448.0)}
"""The least and the largest code of each kind."""
SMALLER_GROUPS = (64, 32)
"""Groups for weights whose columns a larger one does not divide, such as the 576 of SmolLM2 135M by 128."""
ROOM, SMALL = 1.05, 0.5
"""How much larger a group may grow before it gets another scale, and the part of it below which it does too."""


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
        return {"int8": torch.int8, "int4": torch.uint8, "fp8": FP8}[self.codes]

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

    def encode(
        self, weight: Tensor, *, scales: Tensor | None = None, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Codes and scales: the given ones, or the best, in the weight's own dtype, rounded to it before codes are.

        With `noise`, uniform in [0, 1) and of the weight's shape, integers are rounded up as often as they should be.
        """
        groups = self._groups(weight.float())
        low, high = LIMITS[self.codes]
        if scales is None:
            scales = _at_least_normal(groups.abs().amax(dim=-1) / ((high - low) / 2), weight.dtype)
        shares = (groups * (1.0 / scales.float()).unsqueeze(-1)).flatten(-2)
        if self.codes == "fp8":
            return shares.clamp_(low, high).to(FP8), scales
        rounded = (shares.round_() if noise is None else shares.add_(noise).floor_()).clamp_(low, high)
        if self.codes == "int4":
            nibbles = rounded.add_(8).to(torch.uint8)
            return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scales
        return rounded.to(torch.int8), scales

    def renewed(self, scales: Tensor, weight: Tensor) -> Tensor:
        """Scales for a weight that moves by little from step to step: the same, as long as it fits them.

        Another scale rounds every code of its group anew, and chance would then move what the step did not. So they
        have some room, and cut nothing off.
        """
        largest, high = self._groups(weight.float()).abs().amax(dim=-1), LIMITS[self.codes][1]
        full = high * scales.float()
        fits = (largest <= full) & (largest >= SMALL * full)
        return torch.where(fits, scales, _at_least_normal(largest * ROOM / high, scales.dtype))

    def _groups(self, weight: Tensor) -> Tensor:
        groups: Tensor = weight.unflatten(-1, (-1, self.group or weight.shape[-1]))
        return groups

    def whole(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """One number for each code, not scaled yet."""
        if self.codes == "int4":
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(torch.int8) - 8
        return codes.to(dtype)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The weight, in the dtype of the scales."""
        numbers = self.whole(codes, scales.dtype)
        numbers.unflatten(-1, (scales.shape[-1], -1)).mul_(scales.unsqueeze(-1))
        return numbers


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


def _at_least_normal(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return scales.clamp(min=torch.finfo(dtype).smallest_normal).to(dtype)


def code_tokens(x: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round each token, a row of `x`, to codes: them, their scales, and for the asymmetric kind the code of zero."""
    numbers = x.float()
    if kind == "int8-asymmetric":
        least, most = numbers.amin(dim=-1, keepdim=True).clamp(max=0), numbers.amax(dim=-1, keepdim=True).clamp(min=0)
        scales = ((most - least) / 255.0).clamp(min=torch.finfo(x.dtype).smallest_normal)
        zeros = (-128 - (least / scales).round()).clamp(-128, 127)
        codes = ((numbers * (1.0 / scales)).round() + zeros).clamp(-128, 127)
        return codes.to(torch.int8), scales, zeros
    low, high = LIMITS[kind]
    scales = (numbers.abs().amax(dim=-1, keepdim=True) / ((high - low) / 2)).clamp(min=torch.finfo(torch.float32).tiny)
    shares = numbers * (1.0 / scales)
    if kind == "fp8":
        return shares.clamp(low, high).to(FP8), scales, None
    return shares.round().clamp(low, high).to(torch.int8), scales, None
