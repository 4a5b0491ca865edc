"""Cache layers: the interface, the base of all layers that store tokens in a buffer, and the growing `DynamicLayer`."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, WhimbrelError
from whimbrel.cache.buffer import KVBuffer, TokenMajorBuffer, find_codec
from whimbrel.ops import KVView

__all__ = ["BufferedLayer", "CacheLayerMixin", "DynamicLayer", "checked_int", "kept_length"]

MIN_CAPACITY = 16
"""Slots of the first allocation."""


class CacheLayerMixin(ABC):
    """Keys and values of one layer of a model, (batch, heads, tokens, head size).

    Subclasses implement `lazy_initialization` and `update`. Operations they do not support raise before anything
    changes, so a cache of many layers is never left half cropped or half reordered.
    """

    keys: Tensor | None = None
    """As stored (codes, with a codec); None before the layer is initialized."""
    values: Tensor | None = None
    """Like `keys`."""
    dtype: torch.dtype | None = None
    """Dtype of the states passed in and returned; set by the first update."""
    device: torch.device | None = None
    """Set by the first update."""
    is_initialized: bool = False
    is_sliding: bool = False
    """Whether the layer uses sliding-window attention."""
    is_croppable: bool = False
    """Whether the newest tokens can always be removed, once `activate_past_recording` was called."""
    is_compileable: bool = False
    """Whether transformers' `generate` may compile a model with this layer: shapes and addresses never change."""
    token_major: bool = False
    """Whether memory is laid out token by token; set by the cache if the first states are not torch tensors."""
    padding: tuple[int, ...] | None = None
    """Left padding of each sequence in tokens; set by the cache, None without padding."""
    needs_padding: bool = False
    """Whether results are wrong for left-padded batches unless `padding` is set."""
    record_past: bool = False
    """Whether tokens outside the window are kept until the next `crop`."""

    def __repr__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def lazy_initialization(self, key_states: Tensor) -> None:
        """Set dtype, device and shape from the first keys."""

    @abstractmethod
    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append tokens; returns all keys and values that the new tokens may attend to, in order."""

    def append(self, key_states: Tensor, value_states: Tensor) -> KVView:
        """Append tokens; returns what attention may read."""
        return KVView(*self.update(key_states, value_states))

    def get_seq_length(self) -> int:
        """Tokens appended so far, including those that a window has evicted."""
        return 0 if self.keys is None else self.keys.size(2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys the next `query_length` tokens will attend to, and the position of the first key."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Capacity in tokens; -1 if unlimited."""
        return -1

    @property
    def batch_size(self) -> int | None:
        """None before the first update."""
        return None if self.keys is None else self.keys.size(0)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, including unused capacity."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (self.keys, self.values) if tensor is not None)

    def check_crop(self, length: int) -> None:
        """Raise if `crop(length)` is not possible."""
        if kept_length(self.get_seq_length(), length) != self.get_seq_length():
            raise CacheError(f"{self!r} does not support crop: start a new cache")

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, or remove the last `-length`; 0 removes none."""
        self.check_crop(checked_int("length", length))

    def check_recording(self) -> None:
        """Raise if `activate_past_recording` is not possible."""
        if not self.is_croppable:
            raise CacheError(f"{self!r} does not support crop: use a layer that does, such as DynamicLayer")

    def activate_past_recording(self) -> None:
        """Keep tokens outside the window until the next `crop`, which may then remove more tokens."""
        self.check_recording()
        self.record_past = True

    def check_reorder(self, rows: int) -> None:
        """Raise if a `reorder` to `rows` sequences is not possible."""
        if self.get_seq_length():
            raise CacheError(f"{self!r} does not support reordering (to {rows} sequences): use DynamicLayer")

    def reorder(self, index: Tensor) -> None:
        """Make sequence i a copy of sequence `index[i]`."""
        self.check_reorder(index.numel())

    def reset(self) -> None:
        """Remove all tokens."""
        self.keys = self.values = None
        self.is_initialized = False

    def fork(self) -> Self:
        """An independent copy."""
        return copy.deepcopy(self)


class StateSpec(NamedTuple):
    """Dtype, device and shape that all keys and values of a layer must have."""

    dtype: torch.dtype
    device: torch.device
    batch: int
    key: tuple[int, int]
    """Heads and head size."""
    value: tuple[int, int]

    @classmethod
    def of(cls, key_states: Tensor, value_states: Tensor) -> StateSpec:
        """The spec of matching keys and values; raises if they do not match."""
        keys, values = key_states.shape, value_states.shape
        if len(keys) != 4 or len(values) != 4 or keys[0] != values[0] or keys[2] != values[2]:
            raise CacheError(
                "expected keys and values of shape (batch, heads, tokens, head size) with equal batch and tokens, got "
                f"{tuple(keys)} and {tuple(values)}"
            )
        if key_states.dtype != value_states.dtype or key_states.device != value_states.device:
            raise CacheError(
                f"expected keys and values of one dtype and device, got {key_states.dtype} on {key_states.device} and "
                f"{value_states.dtype} on {value_states.device}: convert one of them"
            )
        return cls(key_states.dtype, key_states.device, keys[0], (keys[1], keys[3]), (values[1], values[3]))

    def __str__(self) -> str:
        keys, values = (f"{heads} heads of {size}" for heads, size in (self.key, self.value))
        shape = keys if self.key == self.value else f"{keys} (values {values})"
        return f"{self.dtype} on {self.device}, batch {self.batch}, {shape}"


class BufferedLayer(CacheLayerMixin):
    """Stores tokens in order in the slots `_start` to `_end` of a buffer; `_store` of a subclass adds new ones."""

    supports_grad: bool = False
    """Whether gradients flow to stored keys and values (never with a codec)."""

    def __init__(self, *, codec: str = "none") -> None:
        self.codec = find_codec(codec)
        self._spec: StateSpec | None = None
        self._memory: KVBuffer | None = None
        self._start = self._end = self._seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Set dtype, device and shape from the first keys and values; values default to the shape of the keys."""
        values = key_states if value_states is None else value_states
        spec = StateSpec.of(key_states, values)
        self._memory = self._encode(key_states[:, :, :0], values[:, :, :0]).new_empty(0)
        self._spec, self.dtype, self.device, self.is_initialized = spec, spec.dtype, spec.device, True
        self._sync_keys_and_values()

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append tokens; returns all keys and values that they may attend to, in order. Ignores `cache_kwargs`."""
        return self.append(key_states, value_states).dense(key_states.dtype)

    def append(self, key_states: Tensor, value_states: Tensor) -> KVView:
        """Append tokens; returns what attention may read, valid until the next change."""
        self._check_states(key_states, value_states)
        self.check_capacity(key_states.size(2))
        new = self._encode(key_states, value_states)
        if self._spec is None:
            self.lazy_initialization(key_states, value_states)
        visible = self._store(new)
        self._seen += new.num_slots
        self._sync_keys_and_values()
        return self._view(visible)

    def view(self) -> KVView:
        """All stored tokens."""
        if self._memory is None:
            raise CacheError(f"{self!r} is empty: append tokens first")
        return self._view(self._stored())

    def check_capacity(self, tokens: int) -> None:
        """Raise if `tokens` more cannot be appended."""

    def get_seq_length(self) -> int:
        return self._seen

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def check_crop(self, length: int) -> None:
        """Never raises: all tokens are stored."""

    def crop(self, length: int) -> None:
        length = checked_int("length", length)
        self.check_crop(length)
        self._truncate(kept_length(self._seen, length))
        self._sync_keys_and_values()

    def check_reorder(self, rows: int) -> None:
        """Never raises: any selection of sequences is possible."""

    def reorder(self, index: Tensor) -> None:
        if self._memory is None or self._spec is None:
            return
        self.check_reorder(index.numel())
        self._replace_stored(self._stored().select_rows(index))
        self._spec = self._spec._replace(batch=index.numel())
        self._sync_keys_and_values()

    def reset(self) -> None:
        """Remove all tokens; the next may have another dtype, device and shape."""
        super().reset()
        self._spec = self._memory = self.dtype = self.device = None
        self._start = self._end = self._seen = 0

    def fork(self) -> Self:
        other = copy.copy(self)
        if self._memory is not None:
            other._memory = self._memory.resize(self._memory.num_slots)
            other._sync_keys_and_values()
        return other

    # For subclasses

    @abstractmethod
    def _store(self, new: KVBuffer) -> KVBuffer:
        """Write `new` after the stored tokens; returns the slots that it may attend to, including itself."""

    @property
    def _buffer(self) -> KVBuffer:
        assert self._memory is not None
        return self._memory

    def _stored(self) -> KVBuffer:
        return self._buffer.slice(self._start, self._end)

    def _replace_stored(self, stored: KVBuffer) -> None:
        """Store other sequences, with the same capacity."""
        self._memory = stored.resize(self._buffer.num_slots - self._start)
        self._start, self._end = 0, stored.num_slots

    def _truncate(self, kept: int) -> None:
        """Store only the first `kept` tokens."""
        self._end = self._end - (self._seen - kept) if kept else self._start
        self._seen = kept

    def _append_slots(self, first: int, new: KVBuffer) -> None:
        """Append `new`; if this reallocates the buffer, only the slots starting at `first` are kept."""
        if self._needs_grad(new):
            self._memory = self._buffer.slice(first, self._end).concat_with_grad(new)
            self._start, self._end = 0, self._memory.num_slots
            return
        buffer = self._buffer
        if self._end + new.num_slots > buffer.num_slots or buffer.requires_grad:
            self._reallocate(first, self._capacity_for(self._end - first + new.num_slots))
        self._buffer.write(self._end, new)
        self._end += new.num_slots

    def _capacity_for(self, tokens: int) -> int:
        """Slots to allocate for `tokens`: doubling makes the amortized cost of an append O(1)."""
        return max(MIN_CAPACITY, 1 << max(tokens - 1, 0).bit_length())

    def _release_memory(self) -> None:
        """Shrink the buffer if less than half of it is needed."""
        if self._memory is not None:
            capacity = self._capacity_for(self._end - self._start)
            if self._memory.num_slots > 2 * capacity:
                self._reallocate(self._start, capacity)

    def _reallocate(self, start: int, capacity: int) -> None:
        """Move the slots starting at `start` to new memory of `capacity` slots."""
        self._memory = self._buffer.slice(start, self._end).resize(capacity)
        self._start, self._end = 0, self._end - start

    def _needs_grad(self, new: KVBuffer) -> bool:
        """Whether `new` or stored tokens are part of an autograd graph: then nothing may be written in place."""
        return torch.is_grad_enabled() and (new.requires_grad or self._buffer.requires_grad)

    def _encode(self, key_states: Tensor, value_states: Tensor) -> KVBuffer:
        return (TokenMajorBuffer if self.token_major else KVBuffer).encode(key_states, value_states, self.codec)

    def _key_positions(self, slots: int) -> Tensor | None:
        """Positions of the slots that `_store` returned last; None if they are the newest tokens, in order."""
        return None

    def _view(self, visible: KVBuffer, key_positions: Tensor | None = None) -> KVView:
        return KVView(
            visible.keys,
            visible.values,
            self._key_positions(visible.num_slots) if key_positions is None else key_positions,
            key_scales=visible.key_scales,
            value_scales=visible.value_scales,
            codec=self.codec,
        )

    def _sync_keys_and_values(self) -> None:
        """Point `keys` and `values` at the stored slots."""
        if self._memory is not None:
            stored = self._stored()
            self.keys, self.values = stored.keys, stored.values

    def _check_states(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise if dtype, device or shape differ from earlier states, or if gradients would be lost."""
        spec = StateSpec.of(key_states, value_states)
        if self._spec is not None and spec != self._spec:
            raise CacheError(f"{self!r}: expected {self._spec}, got {spec}: convert them, or use another cache")
        if self.supports_grad and self.codec is None:
            return
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            what = repr(self) if self.codec is None else f"{self!r} with codec {self.codec.name!r}"
            raise CacheError(
                f"{what} does not support gradients: run under torch.no_grad(), or use DynamicLayer without a codec"
            )


class DynamicLayer(BufferedLayer):
    """Stores every token. Capacity doubles when full, and shrinks when most of it is cropped."""

    is_croppable = True
    supports_grad = True

    def _store(self, new: KVBuffer) -> KVBuffer:
        self._append_slots(self._start, new)
        return self._stored()

    def _truncate(self, kept: int) -> None:
        super()._truncate(kept)
        self._release_memory()


def checked_int(name: str, value: Any, *, minimum: int | None = None, error: type[WhimbrelError] = CacheError) -> int:
    """`value` as a Python int; accepts ints, NumPy integers and integer tensors of one element.

    Called before any state changes: a tensor kept as a length would be shared by all layers and incremented in place.
    """
    number: int = value
    if type(value) is not int:
        try:
            if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
                raise TypeError
            number = operator.index(value)
        except (TypeError, ValueError, RuntimeError):
            got = f"{value.dtype} of shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
            raise error(f"{name}: expected an integer, got {got}") from None
    if minimum is not None and number < minimum:
        raise error(f"{name}: expected at least {minimum}, got {number}")
    return number


def kept_length(seen: int, length: int) -> int:
    """How many of `seen` tokens `crop(length)` keeps."""
    return min(seen, length) if length > 0 else max(0, seen + length)
