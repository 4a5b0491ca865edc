"""A layer whose memory is taken once and never moves."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, ConfigError
from whimbrel.cache.layer import checked_int
from whimbrel.cache.slots import Slots
from whimbrel.cache.stored import StoredLayer
from whimbrel.ops import View

__all__ = ["StaticLayer"]


class StaticLayer(StoredLayer):
    """Holds up to `max_cache_len` tokens at one address; more are refused before any is written.

    `update` hands back the whole memory, zero where there is no token yet, and `get_mask_sizes` says so: a model of
    `transformers` masks the rest, and its shapes never change, as `torch.compile` and CUDA graphs want them. `append`
    hands back what is filled.

    The number of tokens is kept twice: on the host, to refuse too many and to read only what is filled, and on the
    device, where compiled code reads and advances it without a new graph for each length. The host reads the device's
    number again after compiled code has run. Compiled code cannot refuse: writing past the end is torch's own error.
    """

    is_croppable = True
    is_compileable = True

    def __init__(self, max_cache_len: int, *, codec: str = "none") -> None:
        super().__init__(codec=codec)
        self.max_cache_len = checked_int("max_cache_len", max_cache_len, minimum=1, error=ConfigError)
        self._length: Tensor | None = None
        self._is_behind = False
        """Whether compiled code has advanced `_length` past what the host knows."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Take dtype, device and shape from the first keys and values, and the memory of all tokens to come."""
        super().lazy_initialization(key_states, value_states)
        self._buffer = self._filled_buffer().empty(self.max_cache_len)
        self._buffer.clear()
        with torch.inference_mode(False):  # noqa: FBT003 - torch.compile knows no keyword here
            self._length = torch.zeros((), dtype=torch.long, device=key_states.device)
        self._pin()
        self._expose()

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append tokens and return the whole buffer; mask everything past `get_seq_length()`."""
        self.append(key_states, value_states)
        return self._view(self._filled_buffer()).dense(key_states.dtype)

    def append(self, key_states: Tensor, value_states: Tensor) -> View:
        """Append tokens and say what attention may read of the layer now; valid until the next change."""
        if torch.compiler.is_compiling():
            return self._append_compiled(key_states, value_states)
        self._catch_up()
        view = super().append(key_states, value_states)
        self._publish()
        return view

    def _append_compiled(self, key_states: Tensor, value_states: Tensor) -> View:
        self._check(key_states, value_states)
        new = self._encoded(key_states, value_states)
        if self._length is None:
            self.lazy_initialization(key_states, value_states)
        assert self._length is not None
        buffer, device = self._filled_buffer(), key_states.device
        buffer.write_at(torch.arange(new.number, device=device) + self._length, new)
        self._length.add_(new.number)
        self._is_behind = True
        slots = torch.arange(self.max_cache_len, device=device)
        return self._view(buffer, torch.where(slots < self._length, slots, -1))

    def get_seq_length(self) -> int:
        """How many tokens were appended; inside compiled code a tensor, as that of `transformers`."""
        if torch.compiler.is_compiling():
            return 0 if self._length is None else self._length.clone()  # type: ignore[return-value]
        self._catch_up()
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys any tokens will be handed, and the position of the first of them."""
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        """How many tokens there is room for."""
        return self.max_cache_len

    def check_room(self, tokens: int) -> None:
        """Refuse more tokens than there is room for."""
        if self._seen + tokens > self.max_cache_len:
            raise CacheError(
                f"{self!r} holds {self._seen} of {self.max_cache_len} tokens and was given {tokens} more: "
                "give a larger max_cache_len, or crop it"
            )

    def check_gather(self, rows: int) -> None:
        """Rows can change places; their number is fixed with the memory."""
        if self._form is not None and rows != self._form.batch:
            raise CacheError(
                f"{self!r} has memory for {self._form.batch} rows and cannot have {rows}: use DynamicLayer, "
                "or fill a new cache"
            )

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, or take back the last `-length`; 0 takes back none."""
        self._catch_up()
        super().crop(length)
        self._publish()

    def reset(self) -> None:
        """Forget every token; the memory stays where it is, for tokens like those before."""
        self._start = self._end = self._seen = 0
        self._is_behind = False
        if self._buffer is not None:
            self._buffer.clear()
        self._publish()

    def fork(self) -> Self:
        """A copy that shares nothing with this layer."""
        self._catch_up()
        other = super().fork()
        if self._length is not None:
            other._length = self._length.clone()
            other._pin()
        return other

    def _cut(self, kept: int) -> None:
        if self._buffer is not None:  # masked numbers must still be finite
            self._buffer.narrow(kept, self._end).clear()
        super()._cut(kept)

    def _store(self, new: Slots) -> Slots:
        self._filled_buffer().write(self._end, new)
        self._end += new.number
        return self._held()

    def _held(self) -> Slots:
        self._catch_up()
        return super()._held()

    def _take_rows(self, held: Slots) -> None:
        self._filled_buffer().write(0, held)

    def _expose(self) -> None:
        if self._buffer is not None:
            self.keys, self.values = self._buffer.keys, self._buffer.values

    def _catch_up(self) -> None:
        """Read the number of tokens from the device if compiled code has changed it."""
        if self._is_behind and self._length is not None:
            self._seen = self._end = int(self._length)
            self._is_behind = False

    def _publish(self) -> None:
        """Write the number of tokens to the device."""
        if self._length is not None:
            self._length.fill_(self._seen)

    def _pin(self) -> None:
        """Tell the compiler that these addresses never change, or it would make no CUDA graphs of code that writes."""
        if torch.compiler.is_compiling() or self._length is None:
            return
        for tensor in (*self._filled_buffer().tensors, self._length):
            torch._dynamo.mark_static_address(tensor)
