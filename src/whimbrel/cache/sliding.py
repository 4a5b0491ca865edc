"""Layers of bounded size: `SlidingLayer` stores a window, `SinkLayer` the first tokens and a window."""

from __future__ import annotations

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, ConfigError
from whimbrel.cache.buffer import KVBuffer
from whimbrel.cache.layer import BufferedLayer, checked_int, kept_length
from whimbrel.ops import KVView

__all__ = ["SinkLayer", "SlidingLayer"]


class SlidingLayer(BufferedLayer):
    """Stores the last `sliding_window` tokens: a token is visible to itself and the next `sliding_window - 1` tokens.

    The window advances through a buffer 1.5 times its size and is moved back to the front when it reaches the end. So
    stored tokens are always contiguous and in order, unlike in a ring buffer, at an amortized two copies per token.
    """

    is_sliding = True
    is_croppable = True
    supports_grad = True

    def __init__(self, sliding_window: int, *, codec: str = "none") -> None:
        super().__init__(codec=codec)
        self.sliding_window = checked_int("sliding_window", sliding_window, minimum=1, error=ConfigError)
        self._span = self.sliding_window
        """Maximum number of stored slots."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        before = self._num_visible()
        return before + query_length, self._seen - before

    def get_max_length(self) -> int:
        """Maximum number of stored tokens."""
        return self._span

    def check_crop(self, length: int) -> None:
        """Raise if the window after the crop would need tokens that were evicted."""
        kept = kept_length(self._seen, length)
        stored = self._end - self._start - (self._seen - kept)
        if kept and stored < min(kept, self._span - 1):
            raise CacheError(
                f"{self!r} has evicted tokens that are needed again at length {kept} of {self._seen}: crop less, "
                "or call activate_past_recording() before they are appended"
            )

    def _num_visible(self) -> int:
        """Stored slots that the next token will attend to."""
        return min(self._seen, self._span - 1)

    def _store(self, new: KVBuffer) -> KVBuffer:
        first = self._end - self._num_visible()
        oversized = self._end - first + new.num_slots > self._max_capacity()
        if oversized and not self.record_past and not self._needs_grad(new):
            return self._store_oversized(self._buffer.slice(first, self._end), new)
        self._append_slots(self._start if self.record_past else first, new)
        visible = self._buffer.slice(self._end - new.num_slots - self._num_visible(), self._end)
        if not self.record_past:
            self._evict()
        return visible

    def _store_oversized(self, before: KVBuffer, new: KVBuffer) -> KVBuffer:
        """For more tokens than fit in the buffer: returns them in temporary memory and stores the last of them."""
        visible = before.concat(new) if before.num_slots else new
        last = visible.slice(visible.num_slots - self._span, visible.num_slots)
        self._memory = last.resize(self._max_capacity())
        self._start, self._end = 0, self._span
        return visible

    def _truncate(self, kept: int) -> None:
        super()._truncate(kept)
        self._evict()
        self._release_memory()

    def _evict(self) -> None:
        self._start = max(self._start, self._end - self._span)

    def _capacity_for(self, tokens: int) -> int:
        capacity = super()._capacity_for(tokens)
        return capacity if self.record_past or capacity < self._span else self._max_capacity()

    def _max_capacity(self) -> int:
        return self._span + max(1, self._span // 2)


class SinkLayer(SlidingLayer):
    """Stores the first `sinks` tokens, known as attention sinks (StreamingLLM), and the last `sliding_window`.

    Tokens keep their original positions, so generation continues up to the model's context length in constant memory.
    Tokens appended together all attend to each other.

    The window advances as in `SlidingLayer`, over `sinks + sliding_window` slots. A left-padded sequence first evicts
    its padding, like a normal window. Once only real tokens are left, its first `sinks` are saved, and from then on
    copied to the front of the window as it moves, into slots it has just left. So the slots of a sequence always end
    with its newest tokens and begin with padding until there is none, which is where a mask built from length and
    padding alone (as in transformers) expects them.
    """

    is_sliding = False  # every returned slot is visible
    is_croppable = False
    needs_padding = True

    def __init__(self, sinks: int, sliding_window: int, *, codec: str = "none") -> None:
        super().__init__(sliding_window, codec=codec)
        self.sinks = checked_int("sinks", sinks, minimum=1, error=ConfigError)
        self._span = self.sinks + self.sliding_window
        self._sink_slots: KVBuffer | None = None
        self._has_sinks: list[bool] = []
        """For each sequence, whether its sinks are in `_sink_slots`."""
        self._first_positions: list[int] | None = None
        """For each sequence, the position of the first slot that was returned last; None if slots are in order."""

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._sink_slots is None else self._sink_slots.nbytes)

    def view(self) -> KVView:
        self._first_positions = self._find_first_positions(self._end - self._start, self._seen)
        return super().view()

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        if self._sink_slots is not None:
            self._sink_slots = self._sink_slots.select_rows(index)
            self._has_sinks = [self._has_sinks[row] for row in index.tolist()]

    def reset(self) -> None:
        super().reset()
        self._drop_sinks()

    def check_capacity(self, tokens: int) -> None:
        """Raise on an empty update."""
        if tokens < 1:
            raise CacheError(f"{self!r}: expected at least 1 token, got {tokens}")

    def _drop_sinks(self) -> None:
        self._sink_slots, self._has_sinks, self._first_positions = None, [], None

    def _truncate(self, kept: int) -> None:
        super()._truncate(kept)
        if kept == 0:
            self._drop_sinks()

    def _store(self, new: KVBuffer) -> KVBuffer:
        total = self._seen + new.num_slots
        if total <= self._span:
            self._first_positions = None
            return super()._store(new)  # nothing is evicted yet
        self._save_sinks(self._stored(), self._seen)
        needs_grad = self._needs_grad(new)
        if new.num_slots == 1 and not needs_grad:
            visible = self._with_sinks(super()._store(new), in_place=True)
            self._first_positions = self._find_first_positions(visible.num_slots, total)
            self._save_sinks(visible, total)
            return visible
        before = self._buffer.slice(self._end - self._num_visible(), self._end)
        before = self._with_sinks(before, in_place=not needs_grad)
        visible = before.concat_with_grad(new) if needs_grad else self._store_oversized(before, new)
        self._first_positions = self._find_first_positions(visible.num_slots, total)
        self._save_sinks(visible, total)
        if needs_grad:
            last = visible.slice(visible.num_slots - self._span, visible.num_slots)
            self._memory, self._start, self._end = self._with_sinks(last, in_place=False), 0, self._span
        else:
            self._with_sinks(self._stored(), in_place=True)
        return visible

    def _save_sinks(self, slots: KVBuffer, total: int) -> None:
        """Save the sinks of sequences without padding left in a window that ends at token `total`.

        `slots` has the tokens of these sequences in order up to `total`.
        """
        batch_size = slots.keys.size(0)
        starts = self.padding or (0,) * batch_size
        saved = self._has_sinks or [False] * batch_size
        # Not the comparison itself: torch.compile would make it a symbolic bool, which is not equal to a bool.
        sinks_ready = [True if start <= total - self._span else False for start in starts]  # noqa: SIM210
        if sinks_ready == saved or not any(sinks_ready):
            return
        offset = total - slots.num_slots
        firsts = [
            start - offset if ready and not saved_before else 0
            for start, ready, saved_before in zip(starts, sinks_ready, saved, strict=True)
        ]
        sinks = slots.gather_slots(firsts, self.sinks)
        self._sink_slots = sinks if self._sink_slots is None else self._sink_slots.where(saved, sinks)
        self._has_sinks = [ready or saved_before for ready, saved_before in zip(sinks_ready, saved, strict=True)]

    def _with_sinks(self, slots: KVBuffer, *, in_place: bool) -> KVBuffer:
        """`slots` with the saved sinks in front."""
        if self._sink_slots is None:
            return slots
        sinks = self._sink_slots
        if not all(self._has_sinks):
            sinks = sinks.where(self._has_sinks, slots.slice(0, self.sinks))
        if not in_place:
            return sinks.concat_with_grad(slots.slice(self.sinks, slots.num_slots))
        slots.write(0, sinks)
        return slots

    def _find_first_positions(self, slots: int, total: int) -> list[int] | None:
        """For each sequence, the position of the first of `slots` slots that end with token `total`."""
        if self._sink_slots is None:
            return None
        starts = self.padding or (0,) * len(self._has_sinks)
        return [start if saved else total - slots for start, saved in zip(starts, self._has_sinks, strict=True)]

    def _key_positions(self, slots: int) -> Tensor | None:
        if self._first_positions is None:
            return None
        firsts = self._first_positions if self.padding is not None else self._first_positions[:1]
        newest = torch.arange(self._seen - slots + self.sinks, self._seen, device=self.device)
        sinks = torch.tensor(firsts, device=self.device)[:, None] + torch.arange(self.sinks, device=self.device)
        positions = torch.cat((sinks, newest.expand(len(firsts), -1)), dim=1)
        return positions if self.padding is not None else positions[0]
