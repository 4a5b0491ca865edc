"""A layer whose memory is taken once and never moves."""

from __future__ import annotations

from torch import Tensor

from whimbrel.base.errors import CacheError, ConfigError
from whimbrel.cache.layer import checked_int
from whimbrel.cache.slots import Slots
from whimbrel.cache.stored import StoredLayer

__all__ = ["StaticLayer"]


class StaticLayer(StoredLayer):
    """Holds up to `max_cache_len` tokens at one address; more are refused before any is written."""

    is_croppable = True

    def __init__(self, max_cache_len: int, *, codec: str = "none") -> None:
        super().__init__(codec=codec)
        self.max_cache_len = checked_int("max_cache_len", max_cache_len, minimum=1, error=ConfigError)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Take dtype, device and shape from the first keys and values, and the memory of all tokens to come."""
        super().lazy_initialization(key_states, value_states)
        self._buffer = self._filled_buffer().empty(self.max_cache_len)

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

    def reset(self) -> None:
        """Forget every token; the memory stays where it is, for tokens like those before."""
        self._start = self._end = self._seen = 0
        self._expose()

    def _store(self, new: Slots) -> Slots:
        self._filled_buffer().write(self._end, new)
        self._end += new.number
        return self._held()

    def _take_rows(self, held: Slots) -> None:
        self._filled_buffer().write(0, held)
