"""`StaticLayer`: a cache layer with fixed capacity, for torch.compile and CUDA graphs."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, ConfigError
from whimbrel.cache.buffer import KVBuffer
from whimbrel.cache.layer import BufferedLayer, checked_int
from whimbrel.ops import KVView

__all__ = ["StaticLayer"]


class StaticLayer(BufferedLayer):
    """Stores up to `max_cache_len` tokens at a fixed address; appending more raises before anything is written.

    `update` returns the complete buffer, zero where there is no token yet, and `get_mask_sizes` reports its size:
    transformers models mask the rest, and shapes never change, as `torch.compile` and CUDA graphs require. `append`
    returns only the filled slots.

    The number of tokens is stored twice: on the host, to check the capacity and read only filled slots, and on the
    device, where compiled code reads and advances it without a new graph for each length. The host reads the device's
    number back after compiled code has run. Compiled code cannot check the capacity: torch raises its own error there.
    """

    is_croppable = True
    is_compileable = True

    def __init__(self, max_cache_len: int, *, codec: str = "none") -> None:
        super().__init__(codec=codec)
        self.max_cache_len = checked_int("max_cache_len", max_cache_len, minimum=1, error=ConfigError)
        self._device_length: Tensor | None = None
        self._host_length_is_stale = False
        """Whether compiled code has advanced `_device_length`."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Take dtype, device and shape from the first keys and values, and allocate all memory."""
        super().lazy_initialization(key_states, value_states)
        self._memory = self._buffer.new_empty(self.max_cache_len)
        self._memory.zero_()
        with torch.inference_mode(False):  # noqa: FBT003 - torch.compile does not support the keyword here
            self._device_length = torch.zeros((), dtype=torch.long, device=key_states.device)
        self._mark_static_addresses()
        self._sync_keys_and_values()

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append tokens; returns the complete buffer. Mask everything past `get_seq_length()`."""
        self.append(key_states, value_states)
        return self._view(self._buffer).dense(key_states.dtype)

    def append(self, key_states: Tensor, value_states: Tensor) -> KVView:
        if torch.compiler.is_compiling():
            return self._append_compiled(key_states, value_states)
        self._sync_host_length()
        view = super().append(key_states, value_states)
        self._sync_device_length()
        return view

    def _append_compiled(self, key_states: Tensor, value_states: Tensor) -> KVView:
        self._check_states(key_states, value_states)
        new = self._encode(key_states, value_states)
        if self._device_length is None:
            self.lazy_initialization(key_states, value_states)
        assert self._device_length is not None
        buffer, device = self._buffer, key_states.device
        buffer.index_copy_(torch.arange(new.num_slots, device=device) + self._device_length, new)
        self._device_length.add_(new.num_slots)
        self._host_length_is_stale = True
        slots = torch.arange(self.max_cache_len, device=device)
        return self._view(buffer, torch.where(slots < self._device_length, slots, -1))

    def get_seq_length(self) -> int:
        """Tokens appended so far; inside compiled code a tensor, as in transformers."""
        if torch.compiler.is_compiling():
            return 0 if self._device_length is None else self._device_length.clone()  # type: ignore[return-value]
        self._sync_host_length()
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Size of the buffer, and 0."""
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def check_capacity(self, tokens: int) -> None:
        if self._seen + tokens > self.max_cache_len:
            raise CacheError(
                f"{self!r}: expected at most {self.max_cache_len - self._seen} more tokens ({self._seen} of "
                f"{self.max_cache_len} used), got {tokens}: raise max_cache_len, or crop"
            )

    def check_reorder(self, rows: int) -> None:
        """Raise if the number of sequences would change: memory is allocated for a fixed one."""
        if self._spec is not None and rows != self._spec.batch:
            raise CacheError(
                f"{self!r} has a fixed batch size: expected {self._spec.batch} sequences, got {rows}: use "
                "DynamicLayer, or start a new cache"
            )

    def crop(self, length: int) -> None:
        self._sync_host_length()
        super().crop(length)
        self._sync_device_length()

    def reset(self) -> None:
        """Remove all tokens; memory, dtype and shape stay."""
        self._start = self._end = self._seen = 0
        self._host_length_is_stale = False
        if self._memory is not None:
            self._memory.zero_()
        self._sync_device_length()

    def fork(self) -> Self:
        self._sync_host_length()
        other = super().fork()
        if self._device_length is not None:
            other._device_length = self._device_length.clone()
            other._mark_static_addresses()
        return other

    def _truncate(self, kept: int) -> None:
        if self._memory is not None:  # masked slots must be finite: 0 * NaN is NaN
            self._memory.slice(kept, self._end).zero_()
        super()._truncate(kept)

    def _store(self, new: KVBuffer) -> KVBuffer:
        self._buffer.write(self._end, new)
        self._end += new.num_slots
        return self._stored()

    def _stored(self) -> KVBuffer:
        self._sync_host_length()
        return super()._stored()

    def _replace_stored(self, stored: KVBuffer) -> None:
        self._buffer.write(0, stored)

    def _sync_keys_and_values(self) -> None:
        if self._memory is not None:
            self.keys, self.values = self._memory.keys, self._memory.values

    def _sync_host_length(self) -> None:
        """Read the number of tokens from the device if compiled code has changed it."""
        if self._host_length_is_stale and self._device_length is not None:
            self._seen = self._end = int(self._device_length)
            self._host_length_is_stale = False

    def _sync_device_length(self) -> None:
        if self._device_length is not None:
            self._device_length.fill_(self._seen)

    def _mark_static_addresses(self) -> None:
        """Without this, torch.compile does not use CUDA graphs for code that writes to the buffer."""
        if torch.compiler.is_compiling() or self._device_length is None:
            return
        for tensor in (*self._buffer.tensors, self._device_length):
            torch._dynamo.mark_static_address(tensor)
