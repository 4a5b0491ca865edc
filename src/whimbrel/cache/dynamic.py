"""The cache of a whole model, by its config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from whimbrel.base.errors import ConfigError
from whimbrel.cache.architecture import layer_windows
from whimbrel.cache.container import Cache, CacheOptions
from whimbrel.cache.growing import DynamicLayer
from whimbrel.cache.layer import CacheLayerMixin, checked_int
from whimbrel.cache.sliding import SlidingLayer
from whimbrel.cache.static import StaticLayer
from whimbrel.cache.stored import StoredLayer

__all__ = ["DynamicCache", "StaticCache"]


class DynamicCache(Cache):
    """Grows with the text; layers with a window hold no more than it.

    With a `config` (a `GPTConfig`, or one of `transformers`) there is one layer for each of the model's that keeps keys
    and values; without, all see everything and appear as they are first written to. A `codec` (fp8, int8, int4) stores
    numbers as codes.

    Iterating gives (keys, values, window or None) for each layer, and `ddp_cache_data` takes such tuples, or pairs, to
    start from, as the `DynamicCache` of `transformers` does (there it is the first argument, and may be here, too).
    What windows have let go is not in them: a layer that is built from them counts only what they hold.
    """

    def __init__(
        self,
        config: Any | None = None,
        *,
        ddp_cache_data: Iterable[Sequence[Tensor | None]] | None = None,
        codec: str = "none",
        **options: Unpack[CacheOptions],
    ) -> None:
        if isinstance(config, Iterable) and not hasattr(config, "get_text_config"):  # configs can be iterated over, too
            if ddp_cache_data is not None:
                raise ConfigError("expected a config beside ddp_cache_data, got the keys and values of layers twice")
            config, ddp_cache_data = None, config
        full = partial(DynamicLayer, codec=codec)
        data = None if ddp_cache_data is None else [_checked_entry(entry) for entry in ddp_cache_data]
        if config is not None:
            super().__init__([_sliding(window, codec) or full() for window in layer_windows(config)], **options)
        elif data:
            super().__init__([_sliding(window, codec) or full() for _, _, window in data], **options)
        else:
            full()  # what no layer can be is refused here, not at the first token
            super().__init__(None, full, **options)
        for layer_idx, (keys, values, _) in enumerate(data or ()):
            if keys is not None and values is not None:
                self.update(keys, values, layer_idx)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        for layer in self.layers:
            window = getattr(layer, "sliding_window", None)
            held = layer.view().dense(layer.dtype) if isinstance(layer, StoredLayer) and layer.dtype else (None, None)
            yield *held, None if window is None else torch.tensor(window)


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


def _checked_entry(entry: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None, int | None]:
    """Keys, values and window of one layer."""
    if len(entry) not in (2, 3):
        raise ConfigError(f"expected (keys, values) or (keys, values, window) for each layer, got {len(entry)} items")
    window = entry[2] if len(entry) == 3 else None
    return entry[0], entry[1], None if window is None else checked_int("window", window, minimum=1, error=ConfigError)


def _sliding(window: int | None, codec: str) -> CacheLayerMixin | None:
    return None if window is None else SlidingLayer(window, codec=codec)
