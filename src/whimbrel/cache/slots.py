"""The tensors of one layer side by side, one slot per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError
from whimbrel.ops.lowbit import GroupCodec

__all__ = ["Slots", "TokenMajorSlots"]


class Slots(NamedTuple):
    """Keys and values as they are stored, (batch, heads, slots, ...), with their scales where a codec made them."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def encoded(cls, key_states: Tensor, value_states: Tensor, codec: GroupCodec | None) -> Slots:
        """New tokens as they will be stored; numbers that are stored as they are stay where they are."""
        if not torch.is_grad_enabled():  # a leaf may require a gradient that nobody will ask for
            key_states, value_states = key_states.detach(), value_states.detach()
        if codec is None:
            return cls(key_states, value_states)
        if not key_states.is_floating_point():
            raise CacheError(f"codec {codec.name}: expected a floating-point dtype, got {key_states.dtype}")
        (keys, key_scales), (values, value_scales) = codec.encode(key_states), codec.encode(value_states)
        return cls(keys, values, key_scales, value_scales)

    @property
    def tensors(self) -> list[Tensor]:
        """Keys, values and the scales there are."""
        return [tensor for tensor in self if tensor is not None]

    @property
    def number(self) -> int:
        """How many slots there are."""
        return self.keys.size(2)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are kept alive, a tensor that others share included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows any of the tensors."""
        return any(tensor.requires_grad for tensor in self.tensors)

    def narrow(self, start: int, end: int) -> Slots:
        """The slots from `start` to `end`, in place."""
        return self._each(lambda tensor: tensor.narrow(2, start, end - start))

    def write(self, start: int, new: Slots) -> None:
        """Copy `new` into the slots from `start` on."""
        for mine, theirs in zip(self.tensors, new.tensors, strict=True):
            mine.narrow(2, start, theirs.size(2)).copy_(theirs)

    def write_at(self, slots: Tensor, new: Slots) -> None:
        """Copy `new` into the slots of these numbers."""
        for mine, theirs in zip(self.tensors, new.tensors, strict=True):
            mine.index_copy_(2, slots, theirs)

    def clear(self) -> None:
        """Write zeros to every slot."""
        for tensor in self.tensors:
            tensor.zero_()

    def enlarged(self, slots: int) -> Slots:
        """A copy with room for `slots`; what lies past these is undefined."""
        larger = self.empty(slots)
        larger.write(0, self)
        return larger

    def empty(self, slots: int) -> Slots:
        """New memory alike in all but the number of slots."""
        return self._copied(lambda tensor: tensor.new_empty((*tensor.shape[:2], slots, *tensor.shape[3:])))

    def followed_by(self, new: Slots) -> Slots:
        """Both, one after the other, in new memory."""
        joined = self.enlarged(self.number + new.number)
        joined.write(self.number, new)
        return joined

    def rows(self, index: Tensor) -> Slots:
        """The rows of the batch that `index` names, in new memory."""
        return self._copied(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def joined(self, new: Slots) -> Slots:
        """Both, one after the other, without writing to any tensor: what autograd can follow."""
        pairs = zip(self.tensors, new.tensors, strict=True)
        return type(self)(*(torch.cat(pair, dim=2) for pair in pairs))

    def where(self, rows: Sequence[bool], other: Slots) -> Slots:
        """These slots in the rows that are named, and as many of `other` in the rest."""
        chosen = torch.tensor(rows, device=self.keys.device)[:, None, None, None]
        theirs = iter(other.tensors)
        return self._copied(lambda tensor: torch.where(chosen, tensor, next(theirs)))

    def run(self, starts: Sequence[int], slots: int) -> Slots:
        """A copy of `slots` slots of each row, from its own start on."""
        device = self.keys.device
        index = torch.tensor(starts, device=device)[:, None] + torch.arange(slots, device=device)
        return self._copied(lambda tensor: tensor.take_along_dim(index[:, None, :, None], dim=2))

    def _copied(self, change: Callable[[Tensor], Tensor]) -> Slots:
        """What `change` makes of each tensor, as tensors that can be written to outside of inference mode too."""
        follows = torch.is_grad_enabled()  # leaving inference mode would turn it on
        with torch.inference_mode(False):  # noqa: FBT003 - torch.compile knows no keyword here
            return self._each(lambda tensor: change(tensor if follows else tensor.detach()))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Slots:
        return type(self)(*map(change, self.tensors))


class TokenMajorSlots(Slots):
    """Slots whose memory goes token by token, so any run of them is dense, whatever the batch and heads.

    Frameworks that have no strided arrays (JAX) can read such a run in place; torch reads it more slowly than heads
    that lie each in one piece.
    """

    def empty(self, slots: int) -> Slots:
        """New memory alike in all but the number of slots."""
        return self._copied(
            lambda tensor: tensor.new_empty((slots, *tensor.shape[:2], *tensor.shape[3:])).permute(1, 2, 0, 3)
        )
