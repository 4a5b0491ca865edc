"""Storage of optimizer state (fp32, bf16, int8, int4) and low-bit weight updates, using `whimbrel.ops.lowbit`."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from whimbrel.base.errors import OptimizerError
from whimbrel.config import not_one_of
from whimbrel.ops.lowbit import INT4, INT8, UINT8, FloatCodec, PowerCodec, stochastic_round

__all__ = ["QuantizedParameter", "StateCodec", "add_with_stochastic_rounding_", "state_codec"]

StateCodec: TypeAlias = FloatCodec | PowerCodec


@runtime_checkable
class QuantizedParameter(Protocol):
    """Interface of a tensor subclass that stores a parameter as codes with per-row scales."""

    def dequantize(self) -> Tensor:
        """The weight as a dense tensor."""

    def stochastic_copy_(self, values: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Overwrite the values, with stochastic rounding."""


def state_codec(store: str, kind: Literal["basis", "signed", "positive"]) -> StateCodec:
    """The codec for a basis, or for a signed or non-negative moment, given the `store` or `basis_store` option."""
    if store in ("fp32", "bf16"):
        return FloatCodec(torch.float32 if store == "fp32" else torch.bfloat16)
    if store == "int4" and kind == "basis":
        return PowerCodec(INT4)
    if store == "int8":
        if kind == "positive":
            return PowerCodec(UINT8, power=4)
        return PowerCodec(INT8, power=1 if kind == "basis" else 2)
    choices = ("fp32", "bf16", "int8", "int4") if kind == "basis" else ("fp32", "bf16", "int8")
    raise OptimizerError(not_one_of("basis_store" if kind == "basis" else "store", store, choices))


def add_with_stochastic_rounding_(weight: Tensor, change: Tensor, generator: torch.Generator) -> None:
    """`weight += change`; quantized and 16-bit weights are rounded stochastically, so that small changes add up."""
    if isinstance(weight, QuantizedParameter):
        weight.stochastic_copy_(weight.dequantize().float().add_(change), generator)
    elif weight.dtype in (torch.bfloat16, torch.float16):
        weight.copy_(stochastic_round(weight.float().add_(change), weight.dtype, generator))
    else:
        weight.add_(change.to(weight.dtype))
