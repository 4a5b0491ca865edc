"""KV caches for all layers of a model: `Cache`, and `DynamicCache` and `StaticCache`, built from a model config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy as shallow_copy
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, CacheIndexError, ConfigError
from whimbrel.cache.foreign import to_torch
from whimbrel.cache.layer import BufferedLayer, CacheLayerMixin, DynamicLayer, checked_int
from whimbrel.cache.sliding import SlidingLayer
from whimbrel.cache.static import StaticLayer
from whimbrel.ops import KVView

__all__ = ["Cache", "DynamicCache", "StaticCache"]

Layout = Literal["bhsd", "bshd"]
"""(batch, heads, sequence, head size) or (batch, sequence, heads, head size)."""
WINDOW_ATTRIBUTES = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Config attribute of the window size of each layer type. A window of one chunk always covers the chunk."""


class CacheOptions(TypedDict, total=False):
    """Keyword arguments that every cache passes on to `Cache`."""

    layout: Layout
    out_layout: Layout | None
    copy: bool
    padding: Tensor | Sequence[int] | None


class Cache:
    """Keys and values of all layers of a model.

    Either `layers` are given and fixed, or `layer_class_to_replicate` creates each one as a model first writes to it.
    `update` takes tensors of any framework in `layout` and returns the same kind in `out_layout` (default: `layout`): a
    view that is valid until the next update, or with `copy` a copy. `append` is the interface of our own models, always
    bhsd. `padding` is the number of left-padding tokens of each sequence.
    """

    def __init__(
        self,
        layers: list[CacheLayerMixin] | None = None,
        layer_class_to_replicate: Callable[[], CacheLayerMixin] | None = None,
        *,
        layout: Layout = "bhsd",
        out_layout: Layout | None = None,
        copy: bool = False,
        padding: Tensor | Sequence[int] | None = None,
    ) -> None:
        if (layers is None) == (layer_class_to_replicate is None):
            got = "neither" if layers is None else "both"
            raise ConfigError(f"expected exactly one of layers and layer_class_to_replicate, got {got}")
        self.layers: list[CacheLayerMixin] = [] if layers is None else layers
        self.layer_class_to_replicate = layer_class_to_replicate
        self.layout = _checked_layout("layout", layout)
        self.out_layout = _checked_layout("out_layout", out_layout or layout)
        self.copy = copy
        self._padding: Tensor | None = None
        self.padding = None if padding is None else _checked_padding(padding)

    @property
    def padding(self) -> Tensor | None:
        """Left padding of each sequence, in tokens."""
        return self._padding

    @padding.setter
    def padding(self, padding: Tensor | None) -> None:
        self._padding = padding
        self._padding_counts = None if padding is None else tuple(padding.tolist())
        for layer in self.layers:
            layer.padding = self._padding_counts

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layers={self.layers})"

    def __len__(self) -> int:
        return len(self.layers)

    def update(
        self,
        key_states: Any,
        value_states: Any,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
        *,
        copy: bool | None = None,
    ) -> tuple[Any, Any]:
        """Append tokens to a layer; returns all keys and values that they may attend to, in order.

        `copy` overrides the cache's setting.
        """
        keys, restore_keys = to_torch(key_states)
        values, restore_values = to_torch(value_states)
        if self.layout == "bshd" and keys.dim() == values.dim() == 4:  # the layer rejects other shapes
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        layer, created = self._get_layer(layer_idx)
        self._check_padding(keys)
        if layer.needs_padding and self.padding is None and keys.dim() == 4:
            raise CacheError(
                f"padding: expected {keys.size(0)} counts ({layer!r} requires them), got none: "
                "pass padding=[...] to the cache, one count per sequence (0 without padding)"
            )
        if not layer.is_initialized:
            layer.token_major = not isinstance(key_states, Tensor)
        keys, values = layer.update(keys, values, cache_kwargs)
        self.layers.extend(created)
        if self.out_layout == "bshd":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if self.copy if copy is None else copy:
            keys, values = keys.clone(), values.clone()
        return restore_keys(keys), restore_values(values)

    def append(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> KVView:
        """Append tokens to a layer; returns what attention may read, valid until the next change."""
        layer, created = self._get_layer(layer_idx)
        self._check_padding(key_states)
        view = layer.append(key_states, value_states)
        self.layers.extend(created)
        if self.padding is None:
            return view
        positions, seen = view.key_positions, layer.get_seq_length()
        if positions is None:
            slots = view.keys.size(2)
            positions = torch.arange(slots, device=key_states.device) + (seen - slots)
        return replace(view, key_positions=self._subtract_padding(positions))

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Positions of the next tokens: (tokens,), or with padding (batch, tokens), negative for padding itself."""
        seen = self.get_seq_length()
        return self._subtract_padding(torch.arange(tokens, device=device) + seen)  # with torch.compile a tensor

    def _subtract_padding(self, positions: Tensor) -> Tensor:
        if self._padding is None:
            return positions
        self._padding = self._padding.to(positions.device)
        return positions - self._padding[:, None]

    def _check_padding(self, key_states: Tensor) -> None:
        counts = self._padding_counts
        if counts is not None and key_states.dim() == 4 and len(counts) != key_states.size(0):
            raise CacheError(
                f"padding: expected one count for each of the {key_states.size(0)} sequences, got {len(counts)}"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens appended to a layer, including padding and those that a window has evicted."""
        layer_idx = checked_int("layer_idx", layer_idx)
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of keys the next `query_length` tokens will attend to, and the position of the first key."""
        query_length, layer_idx = checked_int("query_length", query_length), checked_int("layer_idx", layer_idx)
        if layer_idx < len(self.layers):
            return self.layers[layer_idx].get_mask_sizes(query_length)
        future = self._future_layers()
        return future[0].get_mask_sizes(query_length) if future else (query_length, 0)

    def _future_layers(self) -> list[CacheLayerMixin]:
        """A layer like those that will be created, if any."""
        return [] if self.layer_class_to_replicate is None else [self.layer_class_to_replicate()]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, including unused capacity."""
        return sum(layer.nbytes for layer in self.layers)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, or remove the last `-length`; 0 removes none (`reset` removes all)."""
        length = checked_int("length", length)
        for layer in self.layers:
            layer.check_crop(length)
        for layer in self.layers:
            layer.crop(length)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Make sequence i a copy of sequence `index[i]`; sequences may be repeated or dropped."""
        index = self._checked_index(index)
        for layer in self.layers:
            layer.check_reorder(index.numel())
        for layer in self.layers:
            layer.reorder(index)
        if self.padding is not None:
            self.padding = self.padding[index.to(self.padding.device)]

    def repeat(self, count: int) -> None:
        """Repeat each sequence `count` times, like `torch.repeat_interleave`."""
        count = checked_int("count", count, minimum=1)
        batch = self._batch_size()
        if batch is not None:
            self.reorder(torch.arange(batch).repeat_interleave(count))

    def reset(self) -> None:
        """Remove all tokens."""
        for layer in self.layers:
            layer.reset()

    def fork(self) -> Self:
        """An independent copy."""
        other = shallow_copy(self)
        other.layers = [layer.fork() for layer in self.layers]
        return other

    def _get_layer(self, layer_idx: int) -> tuple[CacheLayerMixin, list[CacheLayerMixin]]:
        """The layer at `layer_idx`, and the layers created for it, to be added once the update has succeeded."""
        layer_idx = checked_int("layer_idx", layer_idx)
        if 0 <= layer_idx < len(self.layers):
            return self.layers[layer_idx], []
        if layer_idx < 0 or self.layer_class_to_replicate is None:
            raise CacheIndexError(
                f"layer_idx: expected 0 to {len(self.layers) - 1} for a cache of {len(self.layers)} layers, got "
                f"{layer_idx}: build the cache with one layer for each layer of the model"
            )
        created = [self.layer_class_to_replicate() for _ in range(layer_idx + 1 - len(self.layers))]
        for layer in created:
            layer.padding = self._padding_counts
        return created[-1], created

    def _batch_size(self) -> int | None:
        sizes = (layer.batch_size for layer in self.layers)
        known = next((size for size in sizes if size is not None), None)
        return self.padding.numel() if known is None and self.padding is not None else known

    def _checked_index(self, index: Tensor | Sequence[int]) -> Tensor:
        index = torch.as_tensor(index)
        if index.dim() != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise CacheError(f"expected a list of integer indices, got {index.dtype} of shape {tuple(index.shape)}")
        batch = self._batch_size()
        if batch is None or index.is_cuda:  # on a GPU, reading the values would synchronize
            return index
        invalid = index[(index < 0) | (index >= batch)].tolist()
        if invalid:
            raise CacheIndexError(f"expected indices from 0 to {batch - 1} (batch of {batch}), got {invalid[0]}")
        return index

    # Names that transformers models and `generate` call

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Alias of `reorder`."""
        self.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Alias of `reorder`."""
        self.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Alias of `repeat`."""
        self.repeat(repeats)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next token."""
        return self.get_seq_length(layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Capacity in tokens of one layer, or the largest of all layers; -1 if unlimited."""
        if layer_idx is None:
            return max((layer.get_max_length() for layer in self.layers), default=-1)
        return self.layers[layer_idx].get_max_length() if layer_idx < len(self.layers) else -1

    def activate_past_recording(self) -> None:
        """Keep tokens outside the windows until the next `crop`."""
        for layer in self.layers:
            layer.check_recording()
        for layer in self.layers:
            layer.activate_past_recording()

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a layer keeps tokens outside its window."""
        return self.layers[layer_idx].record_past

    @property
    def is_compileable(self) -> bool:
        """Whether transformers' `generate` may compile a model with this cache; it then masks single queries, too.

        True if any layer is compileable: such a layer returns empty slots, which must be masked.
        """
        return any(layer.is_compileable for layer in self.layers or self._future_layers())

    @property
    def is_croppable(self) -> bool:
        """Whether the newest tokens can always be removed."""
        return all(layer.is_croppable for layer in self.layers)

    @property
    def is_initialized(self) -> bool:
        """Whether every layer has seen tokens."""
        return bool(self.layers) and all(layer.is_initialized for layer in self.layers)

    @property
    def is_sliding(self) -> list[bool]:
        """For each layer, whether it has a sliding window."""
        return [layer.is_sliding for layer in self.layers]


class DynamicCache(Cache):
    """Grows with the sequence; sliding-window layers only store the window.

    With a `config` (a `GPTConfig` or a transformers config) it has one layer per layer of the model that caches keys
    and values; without one, layers have full attention and are created when they are first written to. `codec` (fp8,
    int8, int4) quantizes keys and values.

    Iterating yields (keys, values, window or None) for each layer. `ddp_cache_data`, which may also be the first
    argument, creates a cache from such tuples or from pairs, as in transformers' `DynamicCache`. Tokens evicted by
    windows are not included: a layer built from them counts only the stored tokens.
    """

    def __init__(
        self,
        config: Any | None = None,
        *,
        ddp_cache_data: Iterable[Sequence[Tensor | None]] | None = None,
        codec: str = "none",
        **options: Unpack[CacheOptions],
    ) -> None:
        if isinstance(config, Iterable) and not hasattr(config, "get_text_config"):  # configs are iterable, too
            if ddp_cache_data is not None:
                raise ConfigError("expected a config as first argument with ddp_cache_data, got layer data in both")
            config, ddp_cache_data = None, config
        make_full = partial(DynamicLayer, codec=codec)
        data = None if ddp_cache_data is None else [_checked_entry(entry) for entry in ddp_cache_data]
        windows = layer_windows(config) if config is not None else [window for _, _, window in data or ()]
        if config is not None or data:
            layers = [make_full() if window is None else SlidingLayer(window, codec=codec) for window in windows]
            super().__init__(list(layers), **options)
        else:
            make_full()  # raises for invalid options now, not at the first token
            super().__init__(None, make_full, **options)
        for layer_idx, (keys, values, _) in enumerate(data or ()):
            if keys is not None and values is not None:
                self.update(keys, values, layer_idx)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        for layer in self.layers:
            window = getattr(layer, "sliding_window", None)
            stored = layer.view().dense(layer.dtype) if isinstance(layer, BufferedLayer) and layer.dtype else None
            yield *(stored or (None, None)), None if window is None else torch.tensor(window)


class StaticCache(Cache):
    """Stores up to `max_cache_len` tokens in memory allocated once; layers with a shorter window slide."""

    def __init__(
        self, config: Any | None = None, *, max_cache_len: int, codec: str = "none", **options: Unpack[CacheOptions]
    ) -> None:
        max_cache_len = checked_int("max_cache_len", max_cache_len, minimum=1, error=ConfigError)
        make_static = partial(StaticLayer, max_cache_len, codec=codec)
        if config is None:
            make_static()  # raises for invalid options now, not at the first token
            super().__init__(None, make_static, **options)
            return
        layers: list[CacheLayerMixin] = [
            SlidingLayer(window, codec=codec) if window and window < max_cache_len else make_static()
            for window in layer_windows(config)
        ]
        super().__init__(layers, **options)


def layer_windows(config: Any) -> list[int | None]:
    """Sliding window of each layer that caches keys and values, None for full attention.

    Takes our `GPTConfig` or any transformers config. The last layers of a model may share the cache of earlier ones
    (`num_kv_shared_layers`) and are omitted.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", getattr(text, "num_layers", None))
    if not isinstance(count, int):
        raise ConfigError(f"expected a model config with num_hidden_layers (or num_layers), got {type(text).__name__}")
    types = getattr(text, "layer_types", None)
    if types is None:
        attributes = ((kind, name) for kind, name in WINDOW_ATTRIBUTES.items() if name is not None)
        types = [next((kind for kind, name in attributes if getattr(text, name, None)), "full_attention")] * count
    if len(types) != count:
        raise ConfigError(f"layer_types: expected {count} entries, one per layer, got {len(types)}")
    shared = getattr(text, "num_kv_shared_layers", None) or 0
    if not 0 <= shared <= count:
        raise ConfigError(f"num_kv_shared_layers: expected at most {count}, the layers of the model, got {shared}")
    return [_window(text, kind) for kind in types[: count - shared]]


def _window(text: Any, kind: str) -> int | None:
    if kind not in WINDOW_ATTRIBUTES:
        raise ConfigError(
            f"layer_types: expected {', '.join(WINDOW_ATTRIBUTES)}, got {kind!r}, which has no keys and values: "
            "use transformers.DynamicCache for this model"
        )
    name = WINDOW_ATTRIBUTES[kind]
    if name is None:
        return None
    window = getattr(text, name, None)
    if not isinstance(window, int):
        raise ConfigError(f"{name}: expected an integer for {kind!r} layers, got {window}")
    return window


def _checked_entry(entry: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None, int | None]:
    """Keys, values and window of one layer."""
    if len(entry) not in (2, 3):
        raise ConfigError(f"expected (keys, values) or (keys, values, window) for each layer, got {len(entry)} items")
    window = entry[2] if len(entry) == 3 else None
    return entry[0], entry[1], None if window is None else checked_int("window", window, minimum=1, error=ConfigError)


def _checked_layout(name: str, layout: Layout) -> Layout:
    if layout not in get_args(Layout):
        raise ConfigError(f"{name}: expected 'bhsd' or 'bshd', got {layout!r}")
    return layout


def _checked_padding(padding: Tensor | Sequence[int]) -> Tensor:
    counts = torch.as_tensor(padding)
    if counts.dim() != 1 or counts.is_floating_point() or counts.dtype == torch.bool or bool((counts < 0).any()):
        raise ConfigError(f"padding: expected one token count (>= 0) per sequence, got {padding}")
    return counts.detach().to(torch.long, copy=True)  # the caller may modify its tensor later
