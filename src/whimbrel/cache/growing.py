"""A layer that grows with the text."""

from __future__ import annotations

from whimbrel.cache.slots import Slots
from whimbrel.cache.stored import StoredLayer

__all__ = ["DynamicLayer"]

SMALLEST_ROOM = 16
"""Tokens that the first memory of a layer has room for."""


class DynamicLayer(StoredLayer):
    """Holds every token; its memory doubles when it is full and is given back when most of it is cropped away."""

    is_croppable = True
    passes_gradients = True

    def _cut(self, kept: int) -> None:
        super()._cut(kept)
        self._let_go()
        if self._buffer is not None:
            room = self._room_for(self._end - self._start)
            if self._buffer.number > 2 * room:
                self._move(self._start, room)

    def _let_go(self) -> None:
        """Forget what will not be seen again: here, nothing."""

    def _store(self, new: Slots) -> Slots:
        self._write(self._start, new)
        return self._held()

    def _write(self, first: int, new: Slots) -> None:
        """Append `new`; where memory has to be taken for it, only the slots from `first` on are kept."""
        if self._follows(new):
            self._buffer = self._filled_buffer().narrow(first, self._end).joined(new)
            self._start, self._end = 0, self._buffer.number
            return
        buffer = self._filled_buffer()
        if self._end + new.number > buffer.number or buffer.requires_grad:
            self._move(first, self._room_for(self._end - first + new.number))
        self._filled_buffer().write(self._end, new)
        self._end += new.number

    def _room_for(self, tokens: int) -> int:
        """How many slots to take where `tokens` are needed: doubling makes an append cost O(1) on average."""
        return max(SMALLEST_ROOM, 1 << max(tokens - 1, 0).bit_length())
