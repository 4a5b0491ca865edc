"""A layer that keeps the first tokens of a text and the newest."""

from __future__ import annotations

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, ConfigError
from whimbrel.cache.sliding import SlidingLayer
from whimbrel.cache.slots import Slots

__all__ = ["SinkLayer"]


class SinkLayer(SlidingLayer):
    """Holds the first `sinks` tokens, on which attention likes to rest, and the last `sliding_window`.

    Positions are those of the text, so a model reads on up to its own context length in little memory. Tokens that are
    appended together all see each other; what was let go before them stays gone. The sinks are copied to the front of
    the window as it moves, into slots it has just left.
    """

    is_sliding = False  # every slot that is handed out may be seen
    is_croppable = False

    def __init__(self, sinks: int, sliding_window: int, *, codec: str = "none") -> None:
        if sinks < 1:
            raise ConfigError(f"sinks = {sinks} must be at least 1: for none, use SlidingLayer")
        super().__init__(sliding_window, codec=codec)
        self.sinks = sinks
        self._span = sinks + sliding_window
        self._first: Slots | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the layer keeps, room for tokens to come included."""
        return super().nbytes + (0 if self._first is None else self._first.nbytes)

    def gather(self, index: Tensor) -> None:
        """Make row i what row `index[i]` is; rows may be repeated or left out."""
        super().gather(index)
        if self._first is not None:
            self._first = self._first.rows(index)

    def reset(self) -> None:
        """Forget every token, and what they were like."""
        super().reset()
        self._first = None

    def check_room(self, tokens: int) -> None:
        """Refuse to be given nothing."""
        if tokens < 1:
            raise CacheError(f"{self!r} was given {tokens} tokens: give at least 1")

    def _cut(self, kept: int) -> None:
        super()._cut(kept)
        if kept == 0:
            self._first = None

    def _store(self, new: Slots) -> Slots:
        if self._seen + new.number <= self._span:
            return super()._store(new)  # nothing has to go
        first = self._first
        if first is None and self._seen >= self.sinks:
            first = self._front(self._held())
        if new.number == 1:
            shown = super()._store(new)
        else:
            before = self._filled_buffer().narrow(self._end - self._still_seen(), self._end)
            if first is not None:
                before.write(0, first)
            shown = self._store_long(before, new)
        self._first = self._front(shown) if first is None else first
        self._held().write(0, self._first)
        return shown

    def _front(self, slots: Slots) -> Slots:
        return slots.narrow(0, self.sinks).enlarged(self.sinks)

    def _key_positions(self, slots: int) -> Tensor | None:
        if slots == self._seen:
            return None
        newest = torch.arange(self._seen - slots + self.sinks, self._seen, device=self.device)
        return torch.cat((torch.arange(self.sinks, device=self.device), newest))
