"""A layer that writes its tokens into slots: what growing, fixed and sliding ones have in common."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError
from whimbrel.cache.codec import find_codec
from whimbrel.cache.layer import CacheLayerMixin, checked_int, kept_length
from whimbrel.cache.slots import Slots, TokenMajorSlots
from whimbrel.ops import View

__all__ = ["StoredLayer"]


class Form(NamedTuple):
    """What all keys and values of a layer have in common."""

    dtype: torch.dtype
    device: torch.device
    batch: int
    key: tuple[int, int]
    value: tuple[int, int]

    def __str__(self) -> str:
        keys, values = (f"{heads} heads of {size}" for heads, size in (self.key, self.value))
        shape = keys if self.key == self.value else f"{keys} (values {values})"
        return f"{self.dtype} on {self.device}, {self.batch} rows, {shape}"


class StoredLayer(CacheLayerMixin):
    """Tokens lie in order in the slots `_start` to `_end` of a buffer; a subclass says where there is room for more."""

    passes_gradients: bool = False
    """Whether gradients reach the keys and values of stored tokens, where these are stored as they are."""

    def __init__(self, *, codec: str = "none") -> None:
        self.codec = find_codec(codec)
        self._form: Form | None = None
        self._buffer: Slots | None = None
        self._start = self._end = self._seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Take dtype, device and shape from the first keys and values; without values, theirs are those of the keys."""
        form = form_of(key_states, key_states if value_states is None else value_states)
        none = key_states[:, :, :0], (key_states if value_states is None else value_states)[:, :, :0]
        self._buffer = self._encoded(*none).empty(0)
        self._form, self.dtype, self.device, self.is_initialized = form, form.dtype, form.device, True
        self._expose()

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append tokens and hand back, in order, all that the new ones may see; no `cache_kwargs` are known here."""
        return self.append(key_states, value_states).dense(key_states.dtype)

    def append(self, key_states: Tensor, value_states: Tensor) -> View:
        """Append tokens and say what attention may read of the layer now; valid until the next change."""
        self._check(key_states, value_states)
        self.check_room(key_states.size(2))
        new = self._encoded(key_states, value_states)
        if self._form is None:
            self.lazy_initialization(key_states, value_states)
        shown = self._store(new)
        self._seen += new.number
        self._expose()
        return self._view(shown)

    def view(self) -> View:
        """All that is held, as it is stored."""
        if self._buffer is None:
            raise CacheError(f"{self!r} has no tokens to show: append some first")
        return self._view(self._held())

    def _view(self, shown: Slots, key_positions: Tensor | None = None) -> View:
        return View(
            shown.keys,
            shown.values,
            self._key_positions(shown.number) if key_positions is None else key_positions,
            key_scales=shown.key_scales,
            value_scales=shown.value_scales,
            codec=self.codec,
        )

    def _encoded(self, key_states: Tensor, value_states: Tensor) -> Slots:
        return (TokenMajorSlots if self.token_major else Slots).encoded(key_states, value_states, self.codec)

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse tokens that are not like those before, or whose gradient would be lost."""
        self._admit(form_of(key_states, value_states))
        if self.passes_gradients and self.codec is None:
            return
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            what = repr(self) if self.codec is None else f"{self!r} with codec {self.codec.name!r}"
            raise CacheError(
                f"{what} passes no gradients to the keys and values it stores: run under torch.no_grad(), "
                "or use DynamicLayer without a codec"
            )

    def _follows(self, new: Slots) -> bool:
        """Whether autograd has to go back through `new` or what is held: nothing may then be written in place."""
        return torch.is_grad_enabled() and (new.requires_grad or self._filled_buffer().requires_grad)

    def check_room(self, tokens: int) -> None:
        """Refuse more tokens than there can be room for."""

    @abstractmethod
    def _store(self, new: Slots) -> Slots:
        """Write `new` after what is held, and hand back the slots that it may see, itself included."""

    def _key_positions(self, slots: int) -> Tensor | None:
        """The positions of the slots that were handed out last; None where the newest tokens lie in order."""
        return None

    def get_seq_length(self) -> int:
        """How many tokens were appended, those that a window has left behind included."""
        return self._seen

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the layer keeps, room for tokens to come included."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, or take back the last `-length`; 0 takes back none."""
        length = checked_int("length", length)
        self.check_crop(length)
        self._cut(kept_length(self._seen, length))
        self._expose()

    def _cut(self, kept: int) -> None:
        """Hold the first `kept` tokens only."""
        self._end = self._end - (self._seen - kept) if kept else self._start
        self._seen = kept

    def check_crop(self, length: int) -> None:
        """Any number of tokens can be taken back where none is ever let go."""

    def check_gather(self, rows: int) -> None:
        """Rows can be reordered, repeated and left out."""

    def gather(self, index: Tensor) -> None:
        """Make row i what row `index[i]` is; rows may be repeated or left out."""
        if self._buffer is None or self._form is None:
            return
        self.check_gather(index.numel())
        self._take_rows(self._held().rows(index))
        self._form = self._form._replace(batch=index.numel())
        self._expose()

    def _take_rows(self, held: Slots) -> None:
        """Go on from `held`, with the room there was."""
        self._buffer = held.enlarged(self._filled_buffer().number - self._start)
        self._start, self._end = 0, held.number

    def reset(self) -> None:
        """Forget every token, and what they were like."""
        super().reset()
        self._form = self._buffer = self.dtype = self.device = None
        self._start = self._end = self._seen = 0

    def fork(self) -> Self:
        """A copy that shares nothing with this layer."""
        other = copy.copy(self)
        if self._buffer is not None:
            other._buffer = self._buffer.enlarged(self._buffer.number)
            other._expose()
        return other

    def _held(self) -> Slots:
        return self._filled_buffer().narrow(self._start, self._end)

    def _filled_buffer(self) -> Slots:
        assert self._buffer is not None
        return self._buffer

    def _move(self, start: int, room: int) -> None:
        """Keep the slots from `start` on, in new memory for `room` tokens; the old memory is free."""
        self._buffer = self._filled_buffer().narrow(start, self._end).enlarged(room)
        self._start, self._end = 0, self._end - start

    def _expose(self) -> None:
        """Let `keys` and `values` show what is held."""
        if self._buffer is not None:
            held = self._held()
            self.keys, self.values = held.keys, held.values

    def _admit(self, form: Form) -> None:
        """Refuse keys and values that are not like those before."""
        if self._form is not None and form != self._form:
            raise CacheError(f"{self!r} holds {self._form} and was given {form}: convert them, or use another cache")


def form_of(key_states: Tensor, value_states: Tensor) -> Form:
    """What keys and values have in common, if they do."""
    keys, values = key_states.shape, value_states.shape
    if len(keys) != 4 or len(values) != 4 or keys[0] != values[0] or keys[2] != values[2]:
        raise CacheError(
            f"keys of shape {tuple(keys)} and values of shape {tuple(values)} are no (batch, heads, tokens, head size) "
            "of the same tokens"
        )
    if key_states.dtype != value_states.dtype or key_states.device != value_states.device:
        raise CacheError(
            f"keys in {key_states.dtype} on {key_states.device} and values in {value_states.dtype} on "
            f"{value_states.device} are mixed: convert one of them"
        )
    return Form(key_states.dtype, key_states.device, keys[0], (keys[1], keys[3]), (values[1], values[3]))
