"""What every layer of a cache is."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, WhimbrelError
from whimbrel.ops import View

__all__ = ["CacheLayerMixin", "checked_int", "kept_length"]


class CacheLayerMixin(ABC):
    """Keys and values of one layer of a model, (batch, heads, tokens, head size).

    A layer of your own needs `lazy_initialization` and `update`; what it does not offer beyond them it refuses before
    anything changes, so a cache of many layers is never left half cropped or half reordered.
    """

    keys: Tensor | None = None
    """As stored, codes where the layer has a codec; None before the layer is initialized."""
    values: Tensor | None = None
    """As `keys`."""
    dtype: torch.dtype | None = None
    """Of the numbers that come in and go out; that of the first update."""
    device: torch.device | None = None
    """That of the first update."""
    is_initialized: bool = False
    is_sliding: bool = False
    """Whether a token is only seen by those that follow it within a window."""
    is_croppable: bool = False
    """Whether the newest tokens can always be taken back, once `activate_past_recording` was called."""
    is_compileable: bool = False
    """Whether `generate` of `transformers` may compile a model around this layer: shapes and addresses never change."""
    token_major: bool = False
    """Whether memory goes token by token: a cache asks it of layers whose first tokens are no torch tensors."""
    padding: tuple[int, ...] | None = None
    """How many tokens at the left of each row are padding; set by the cache, None where no row has any."""
    needs_padding: bool = False
    """Whether padding has to be known when a batch of several rows is stored."""
    record_past: bool = False
    """Whether tokens that no query will see again are kept until the next `crop`."""

    def __repr__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def lazy_initialization(self, key_states: Tensor) -> None:
        """Take dtype, device and shape from the first keys."""

    @abstractmethod
    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append tokens and hand back, in order, all that the new ones may see."""

    def append(self, key_states: Tensor, value_states: Tensor) -> View:
        """Append tokens and say what attention may read of the layer now."""
        return View(*self.update(key_states, value_states))

    def get_seq_length(self) -> int:
        """How many tokens were appended, those that a window has left behind included."""
        return 0 if self.keys is None else self.keys.size(2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next `query_length` tokens will be handed, and the position of the first of them."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """How many tokens there is room for; -1 where there is no limit."""
        return -1

    @property
    def batch_size(self) -> int | None:
        """How many rows the layer has; None before the first update."""
        return None if self.keys is None else self.keys.size(0)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the layer keeps, room for tokens to come included."""
        return sum(held.untyped_storage().nbytes() for held in (self.keys, self.values) if held is not None)

    def check_crop(self, length: int) -> None:
        """Refuse a `crop` that cannot be done."""
        if kept_length(self.get_seq_length(), length) != self.get_seq_length():
            raise CacheError(f"{self!r} cannot take tokens back: read the text again into a new cache")

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, or take back the last `-length`; 0 takes back none."""
        self.check_crop(checked_int("length", length))

    def check_recording(self) -> None:
        """Refuse to promise that tokens can be taken back."""
        if not self.is_croppable:
            raise CacheError(f"{self!r} cannot take tokens back: decode with a layer that can, such as DynamicLayer")

    def activate_past_recording(self) -> None:
        """Keep, until the next `crop`, what a window would let go: that `crop` may take tokens back past it."""
        self.check_recording()
        self.record_past = True

    def check_gather(self, rows: int) -> None:
        """Refuse a `gather` that leaves `rows` rows and cannot be done."""
        if self.get_seq_length():
            raise CacheError(f"{self!r} cannot reorder its rows, now to be {rows}: use a layer that can")

    def gather(self, index: Tensor) -> None:
        """Make row i what row `index[i]` is; rows may be repeated or left out."""
        self.check_gather(index.numel())

    def reset(self) -> None:
        """Forget every token."""
        self.keys = self.values = None
        self.is_initialized = False

    def fork(self) -> Self:
        """A copy that shares nothing with this layer."""
        return copy.deepcopy(self)


def checked_int(name: str, value: Any, *, minimum: int | None = None, error: type[WhimbrelError] = CacheError) -> int:
    """`value` as a Python int; takes ints, NumPy integers and integer tensors of one element.

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
    """How many of `seen` tokens `crop(length)` keeps: `length` of them, all but the last `-length`, or all for 0."""
    return min(seen, length) if length > 0 else max(0, seen + length)
