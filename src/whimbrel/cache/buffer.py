"""How a cache layer stores keys and values: unchanged or as 8-bit or 4-bit codes, in tensors with one slot per token.

With 8 bits, 64 neighboring values of one head of one token share a bf16 scale. With 4 bits that is not enough for keys:
a few channels are many times larger than the rest and would use up the range of their group. So int4 groups are 8
values, each with a minimum and a scale (`AffineCodec`).

Heads and tokens are encoded independently: a token is encoded once, its codes never change, and a later outlier cannot
clip it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, ConfigError
from whimbrel.ops.lowbit import AffineCodec, CodeType, GroupCodec, SymmetricCodec

__all__ = ["KV_CODECS", "KVBuffer", "TokenMajorBuffer", "find_codec"]

KV_CODECS: dict[str, GroupCodec | None] = {
    "none": None,
    "fp8": SymmetricCodec(CodeType("fp8", -448, 448, torch.uint8), 64, torch.bfloat16),
    "int8": SymmetricCodec(CodeType("int8", -127, 127, torch.int8), 64, torch.bfloat16),
    "int4": AffineCodec(CodeType("int4", 0, 15, torch.uint8, packed=True), 8, torch.uint8),
}


def find_codec(name: str) -> GroupCodec | None:
    """The codec of this name; None for "none"."""
    if name not in KV_CODECS:
        raise ConfigError(f"codec: expected one of {', '.join(KV_CODECS)}, got {name!r}")
    return KV_CODECS[name]


class KVBuffer(NamedTuple):
    """Keys and values as they are stored, (batch, heads, slots, ...); scales only with a codec."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def encode(cls, key_states: Tensor, value_states: Tensor, codec: GroupCodec | None) -> KVBuffer:
        """New tokens as they will be stored; without a codec, the tensors themselves."""
        if not torch.is_grad_enabled():  # a leaf that requires grad stays one under no_grad
            key_states, value_states = key_states.detach(), value_states.detach()
        if codec is None:
            return cls(key_states, value_states)
        if not key_states.is_floating_point():
            raise CacheError(f"codec {codec.name}: expected a floating-point dtype, got {key_states.dtype}")
        (keys, key_scales), (values, value_scales) = codec.encode(key_states), codec.encode(value_states)
        return cls(keys, values, key_scales, value_scales)

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values, and the scales if there is a codec."""
        return [tensor for tensor in self if tensor is not None]

    @property
    def num_slots(self) -> int:
        """Size of the token dimension."""
        return self.keys.size(2)

    @property
    def nbytes(self) -> int:
        """Bytes of the underlying storages, which may be larger than the tensors."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    @property
    def requires_grad(self) -> bool:
        """Whether any of the tensors is part of an autograd graph."""
        return any(tensor.requires_grad for tensor in self.tensors)

    def slice(self, start: int, end: int) -> KVBuffer:
        """A view of the slots from `start` to `end`."""
        return self._map(lambda tensor: tensor.narrow(2, start, end - start))

    def write(self, start: int, new: KVBuffer) -> None:
        """Copy `new` into the slots starting at `start`."""
        for target, source in zip(self.tensors, new.tensors, strict=True):
            target.narrow(2, start, source.size(2)).copy_(source)

    def index_copy_(self, slots: Tensor, new: KVBuffer) -> None:
        """Copy `new` into the slots at these indices."""
        for target, source in zip(self.tensors, new.tensors, strict=True):
            target.index_copy_(2, slots, source)

    def zero_(self) -> None:
        """Write zeros to every slot."""
        for tensor in self.tensors:
            tensor.zero_()

    def resize(self, slots: int) -> KVBuffer:
        """A copy with capacity for `slots` slots; the added ones are uninitialized."""
        larger = self.new_empty(slots)
        larger.write(0, self)
        return larger

    def new_empty(self, slots: int) -> KVBuffer:
        """An uninitialized buffer of the same shape and dtype except for the number of slots."""
        return self._map_copy(lambda tensor: tensor.new_empty((*tensor.shape[:2], slots, *tensor.shape[3:])))

    def concat(self, new: KVBuffer) -> KVBuffer:
        """Concatenate along the token dimension, into new memory."""
        joined = self.resize(self.num_slots + new.num_slots)
        joined.write(self.num_slots, new)
        return joined

    def concat_with_grad(self, new: KVBuffer) -> KVBuffer:
        """Like `concat`, but differentiable: nothing is written in place."""
        pairs = zip(self.tensors, new.tensors, strict=True)
        return type(self)(*(torch.cat(pair, dim=2) for pair in pairs))

    def select_rows(self, index: Tensor) -> KVBuffer:
        """A copy of these rows of the batch."""
        return self._map_copy(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def where(self, rows: Sequence[bool], other: KVBuffer) -> KVBuffer:
        """A copy with the rows of this buffer where `rows` is True, and the rows of `other` elsewhere."""
        chosen = torch.tensor(rows, device=self.keys.device)[:, None, None, None]
        theirs = iter(other.tensors)
        return self._map_copy(lambda tensor: torch.where(chosen, tensor, next(theirs)))

    def gather_slots(self, starts: Sequence[int], slots: int) -> KVBuffer:
        """A copy of `slots` slots of each row, beginning at `starts[row]`."""
        device = self.keys.device
        index = torch.tensor(starts, device=device)[:, None] + torch.arange(slots, device=device)
        return self._map_copy(lambda tensor: tensor.take_along_dim(index[:, None, :, None], dim=2))

    def _map_copy(self, function: Callable[[Tensor], Tensor]) -> KVBuffer:
        """Apply `function` outside of inference mode, so that the results can be modified in place later."""
        with_grad = torch.is_grad_enabled()  # read first: leaving inference mode would enable it
        with torch.inference_mode(False):  # noqa: FBT003 - torch.compile does not support the keyword here
            return self._map(lambda tensor: function(tensor if with_grad else tensor.detach()))

    def _map(self, function: Callable[[Tensor], Tensor]) -> KVBuffer:
        return type(self)(*map(function, self.tensors))


class TokenMajorBuffer(KVBuffer):
    """A buffer whose outermost dimension in memory is the token, so any range of slots is contiguous.

    Frameworks without strided arrays (JAX) can read such a range in place; torch reads it more slowly than the default.
    """

    def new_empty(self, slots: int) -> KVBuffer:
        """As in `KVBuffer`, but token-major."""
        return self._map_copy(
            lambda tensor: tensor.new_empty((slots, *tensor.shape[:2], *tensor.shape[3:])).permute(1, 2, 0, 3)
        )
