"""The cache of a whole model, by its config."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

from whimbrel.base.errors import ConfigError
from whimbrel.cache.architecture import layer_windows
from whimbrel.cache.container import Cache, CacheOptions
from whimbrel.cache.growing import DynamicLayer
from whimbrel.cache.layer import CacheLayerMixin, checked_int
from whimbrel.cache.sliding import SlidingLayer
from whimbrel.cache.static import StaticLayer

__all__ = ["DynamicCache", "StaticCache"]


class DynamicCache(Cache):
    """Grows with the text; layers with a window hold no more than it.

    With a `config` (a `GPTConfig`, or one of `transformers`) there is one layer for each of the model's that keeps keys
    and values; without, all see everything and appear as they are first written to. A `codec` (fp8, int8, int4) stores
    numbers as codes.
    """

    def __init__(self, config: Any | None = None, *, codec: str = "none", **options: Unpack[CacheOptions]) -> None:
        full = partial(DynamicLayer, codec=codec)
        if config is None:
            full()  # what no layer can be is refused here, not at the first token
            super().__init__(None, full, **options)
        else:
            super().__init__([_sliding(window, codec) or full() for window in layer_windows(config)], **options)


class StaticCache(Cache):
    """Holds up to `max_cache_len` tokens in memory that is taken once; layers with a shorter window slide."""

    def __init__(
        self, config: Any | None = None, *, max_cache_len: int, codec: str = "none", **options: Unpack[CacheOptions]
    ) -> None:
        max_cache_len = checked_int("max_cache_len", max_cache_len, minimum=1, error=ConfigError)
        full = partial(StaticLayer, max_cache_len, codec=codec)
        if config is None:
            full()
            super().__init__(None, full, **options)
            return
        windows = (window if window and window < max_cache_len else None for window in layer_windows(config))
        super().__init__([_sliding(window, codec) or full() for window in windows], **options)


def _sliding(window: int | None, codec: str) -> CacheLayerMixin | None:
    return None if window is None else SlidingLayer(window, codec=codec)
