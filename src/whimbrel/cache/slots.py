"""The tensors of one layer side by side, one slot per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.cache.codec import Codec

__all__ = ["Slots", "TokenMajorSlots"]


class Slots(NamedTuple):
    """Keys and values as they are stored, (batch, heads, slots, ...), with their scales where a codec made them."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def encoded(cls, key_states: Tensor, value_states: Tensor, codec: Codec) -> Slots:
        """New tokens as they will be stored; numbers that are stored as they are stay where they are."""
        key_states, value_states = key_states.detach(), value_states.detach()
        if codec.is_plain:
            return cls(key_states, value_states)
        (keys, key_scales), (values, value_scales) = codec.encode(key_states), codec.encode(value_states)
        return cls(keys, values, key_scales, value_scales)

    @property
    def number(self) -> int:
        """How many slots there are."""
        return self.keys.size(2)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are kept alive, a tensor that others share included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors())

    def narrow(self, start: int, end: int) -> Slots:
        """The slots from `start` to `end`, in place."""
        return self._each(lambda tensor: tensor.narrow(2, start, end - start))

    def write(self, start: int, new: Slots) -> None:
        """Copy `new` into the slots from `start` on."""
        for mine, theirs in zip(self._tensors(), new._tensors(), strict=True):
            mine.narrow(2, start, theirs.size(2)).copy_(theirs)

    def enlarged(self, slots: int) -> Slots:
        """A copy with room for `slots`; what lies past these is undefined."""
        larger = self.empty(slots)
        larger.write(0, self)
        return larger

    def empty(self, slots: int) -> Slots:
        """New memory alike in all but the number of slots."""
        # Made outside inference mode: an inference tensor could never be written to outside of it again.
        with torch.inference_mode(mode=False):
            return self._each(lambda tensor: tensor.new_empty((*tensor.shape[:2], slots, *tensor.shape[3:])))

    def followed_by(self, new: Slots) -> Slots:
        """Both, one after the other, in new memory."""
        joined = self.enlarged(self.number + new.number)
        joined.write(self.number, new)
        return joined

    def rows(self, index: Tensor) -> Slots:
        """The rows of the batch that `index` names, in new memory."""
        with torch.inference_mode(mode=False):
            return self._each(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in self if tensor is not None]

    def _each(self, change: Callable[[Tensor], Tensor]) -> Slots:
        return type(self)(*map(change, self._tensors()))


class TokenMajorSlots(Slots):
    """Slots whose memory goes token by token, so any run of them is dense, whatever the batch and heads.

    Frameworks that have no strided arrays (JAX) can read such a run in place; torch reads it more slowly than heads
    that lie each in one piece.
    """

    def empty(self, slots: int) -> Slots:
        """New memory alike in all but the number of slots."""
        with torch.inference_mode(mode=False):
            return self._each(
                lambda tensor: tensor.new_empty((slots, *tensor.shape[:2], *tensor.shape[3:])).permute(1, 2, 0, 3)
            )
