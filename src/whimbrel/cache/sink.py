"""A layer that keeps the first tokens of a text and the newest."""

from __future__ import annotations

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, ConfigError
from whimbrel.cache.layer import checked_int
from whimbrel.cache.sliding import SlidingLayer
from whimbrel.cache.slots import Slots
from whimbrel.ops import View

__all__ = ["SinkLayer"]


class SinkLayer(SlidingLayer):
    """Holds the first `sinks` tokens, on which attention likes to rest, and the last `sliding_window`.

    Positions are those of the text, so a model reads on up to its own context length in little memory. Tokens that are
    appended together all see each other; what was let go before them stays gone.

    The window moves along memory as in `SlidingLayer`, over `sinks + sliding_window` slots. A row that is padded at the
    left first lets go of its padding, sliding like a plain window. Once only real tokens are left, its first `sinks`
    are saved, and from then on copied to the front of the window as it moves, into slots it has just left. The slots
    of a row therefore always end with its newest tokens, and start with padding until there is none: where a mask that
    knows only the length and the padding (that of `transformers`) expects them.
    """

    is_sliding = False  # every slot that is handed out may be seen
    is_croppable = False
    needs_padding = True

    def __init__(self, sinks: int, sliding_window: int, *, codec: str = "none") -> None:
        super().__init__(sliding_window, codec=codec)
        self.sinks = checked_int("sinks", sinks, minimum=1, error=ConfigError)
        self._span = self.sinks + self.sliding_window
        self._first: Slots | None = None
        self._saved: list[bool] = []
        """Of each row, whether its sinks are in `_first`."""
        self._fronts: list[int] | None = None
        """Of each row, the token in the first slot of what was handed out last."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the layer keeps, room for tokens to come included."""
        return super().nbytes + (0 if self._first is None else self._first.nbytes)

    def view(self) -> View:
        """All that is held, as it is stored."""
        self._fronts = self._front_tokens(self._end - self._start)
        return super().view()

    def gather(self, index: Tensor) -> None:
        """Make row i what row `index[i]` is; rows may be repeated or left out."""
        super().gather(index)
        if self._first is not None:
            self._first = self._first.rows(index)
            self._saved = [self._saved[row] for row in index.tolist()]

    def reset(self) -> None:
        """Forget every token, and what they were like."""
        super().reset()
        self._forget_sinks()

    def check_room(self, tokens: int) -> None:
        """Refuse to be given nothing."""
        if tokens < 1:
            raise CacheError(f"{self!r}: expected at least 1 token, got {tokens}")

    def _forget_sinks(self) -> None:
        self._first, self._saved, self._fronts = None, [], None

    def _cut(self, kept: int) -> None:
        super()._cut(kept)
        if kept == 0:
            self._forget_sinks()

    def _store(self, new: Slots) -> Slots:
        total = self._seen + new.number
        if total <= self._span:
            self._fronts = None
            return super()._store(new)  # nothing has to go
        self._save_sinks(self._held(), self._seen)
        follows = self._follows(new)
        if new.number == 1 and not follows:
            shown = self._with_sinks(super()._store(new), in_place=True)
            self._fronts = self._front_tokens(shown.number, total)
            self._save_sinks(shown, total)
            return shown
        before = self._filled_buffer().narrow(self._end - self._still_seen(), self._end)
        before = self._with_sinks(before, in_place=not follows)
        shown = before.joined(new) if follows else self._store_long(before, new)
        self._fronts = self._front_tokens(shown.number, total)
        self._save_sinks(shown, total)
        if follows:
            last = shown.narrow(shown.number - self._span, shown.number)
            self._buffer, self._start, self._end = self._with_sinks(last, in_place=False), 0, self._span
        else:
            self._with_sinks(self._held(), in_place=True)
        return shown

    def _save_sinks(self, slots: Slots, total: int) -> None:
        """Save the sinks of rows that have no padding left in a window that ends at token `total`.

        In `slots`, the tokens of these rows lie in order up to `total`.
        """
        rows = slots.keys.size(0)
        starts = self.padding or (0,) * rows
        saved = self._saved or [False] * rows
        # Not the comparison itself: compiled code would keep it as a symbol, which cannot be held against a bool.
        due = [True if start <= total - self._span else False for start in starts]  # noqa: SIM210
        if due == saved or not any(due):
            return
        offset = total - slots.number
        taken = [
            start - offset if now and not before else 0 for start, now, before in zip(starts, due, saved, strict=True)
        ]
        first = slots.run(taken, self.sinks)
        self._first = first if self._first is None else self._first.where(saved, first)
        self._saved = [now or before for now, before in zip(due, saved, strict=True)]

    def _with_sinks(self, slots: Slots, *, in_place: bool) -> Slots:
        """`slots` with the saved sinks in front."""
        if self._first is None:
            return slots
        first = self._first
        if not all(self._saved):
            first = first.where(self._saved, slots.narrow(0, self.sinks))
        if not in_place:
            return first.joined(slots.narrow(self.sinks, slots.number))
        slots.write(0, first)
        return slots

    def _front_tokens(self, slots: int, total: int | None = None) -> list[int] | None:
        """Of each row, the token in the first of `slots` slots that end with token `total`; None: all alike."""
        if self._first is None:
            return None
        starts = self.padding or (0,) * len(self._saved)
        newest = (self._seen if total is None else total) - slots
        return [start if saved else newest for start, saved in zip(starts, self._saved, strict=True)]

    def _key_positions(self, slots: int) -> Tensor | None:
        if self._fronts is None:
            return None
        fronts = self._fronts if self.padding is not None else self._fronts[:1]
        newest = torch.arange(self._seen - slots + self.sinks, self._seen, device=self.device)
        sinks = torch.tensor(fronts, device=self.device)[:, None] + torch.arange(self.sinks, device=self.device)
        positions = torch.cat((sinks, newest.expand(len(fronts), -1)), dim=1)
        return positions if self.padding is not None else positions[0]
