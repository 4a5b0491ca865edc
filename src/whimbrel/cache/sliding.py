"""A layer that lets go of what its window has left behind."""

from __future__ import annotations

from whimbrel.base.errors import CacheError, ConfigError
from whimbrel.cache.growing import DynamicLayer
from whimbrel.cache.layer import checked_int, kept_length
from whimbrel.cache.slots import Slots

__all__ = ["SlidingLayer"]


class SlidingLayer(DynamicLayer):
    """Holds the last `sliding_window` tokens: a token is seen by itself and the `sliding_window - 1` after it.

    The window moves along memory half as long again as itself and starts over at the front when it comes to the end:
    a ring that never wraps, so what is held always lies in order and is read in place, at two copies per token.
    """

    is_sliding = True

    def __init__(self, sliding_window: int, *, codec: str = "none") -> None:
        super().__init__(codec=codec)
        self.sliding_window = checked_int("sliding_window", sliding_window, minimum=1, error=ConfigError)
        self._span = self.sliding_window
        """Slots that are held once there are so many tokens."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next `query_length` tokens will be handed, and the position of the first of them."""
        before = self._still_seen()
        return before + query_length, self._seen - before

    def get_max_length(self) -> int:
        """How many tokens are held at most."""
        return self._span

    def check_crop(self, length: int) -> None:
        """Refuse to take back so many tokens that the window would reach back to some that are gone."""
        kept = kept_length(self._seen, length)
        held = self._end - self._start - (self._seen - kept)
        if kept and held < min(kept, self._span - 1):
            raise CacheError(
                f"{self!r} has let go of tokens that {kept} of {self._seen} would see again: take back fewer, "
                "or call activate_past_recording() before they are appended"
            )

    def _still_seen(self) -> int:
        """How many of the slots held the next token will see."""
        return min(self._seen, self._span - 1)

    def _store(self, new: Slots) -> Slots:
        first = self._end - self._still_seen()
        too_long = self._end - first + new.number > self._longest_room()
        if too_long and not self.record_past and not self._follows(new):
            return self._store_long(self._filled_buffer().narrow(first, self._end), new)
        self._write(self._start if self.record_past else first, new)
        shown = self._filled_buffer().narrow(self._end - new.number - self._still_seen(), self._end)
        if not self.record_past:
            self._let_go()
        return shown

    def _store_long(self, before: Slots, new: Slots) -> Slots:
        """More tokens than the memory of a window has room for: they are shown outside of it, and their last kept."""
        shown = before.followed_by(new) if before.number else new
        self._buffer = shown.narrow(shown.number - self._span, shown.number).enlarged(self._longest_room())
        self._start, self._end = 0, self._span
        return shown

    def _let_go(self) -> None:
        self._start = max(self._start, self._end - self._span)

    def _room_for(self, tokens: int) -> int:
        room, longest = super()._room_for(tokens), self._longest_room()
        return room if self.record_past or room < self._span else longest

    def _longest_room(self) -> int:
        return self._span + max(1, self._span // 2)
