"""The layers of a model's cache as one."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, TypedDict, get_args

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError, CacheIndexError, ConfigError
from whimbrel.cache.foreign import to_torch
from whimbrel.cache.layer import CacheLayerMixin, checked_int
from whimbrel.cache.spelling import TransformersSpelling
from whimbrel.ops import View

__all__ = ["Cache", "CacheOptions", "Layout"]

Layout = Literal["bhsd", "bshd"]
"""(batch, heads, tokens, head size) or (batch, tokens, heads, head size)."""


class CacheOptions(TypedDict, total=False):
    """What every cache can be told beside its layers; `Cache` says what they mean."""

    layout: Layout
    out_layout: Layout | None
    copy: bool
    padding: Tensor | Sequence[int] | None


class Cache(TransformersSpelling):
    """Keys and values of the tokens that a model has read, layer by layer.

    Either `layers` are given, and are all there will be, or `layer_class_to_replicate` makes each one as a model first
    writes to it. `update` takes tensors of any framework laid out as `layout`, and hands the same kind back laid out
    as `out_layout` (`layout` where not given): a view that is valid until the next update, or with `copy` a copy.
    `append` is what our own models call, and always bhsd. `padding` counts the tokens at the left of each row that
    stand for nothing.
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
            given = "neither" if layers is None else "both"
            raise ConfigError(f"{given} of layers and layer_class_to_replicate was given: give exactly one")
        self.layers: list[CacheLayerMixin] = [] if layers is None else layers
        self.layer_class_to_replicate = layer_class_to_replicate
        self.layout = _checked_layout("layout", layout)
        self.out_layout = _checked_layout("out_layout", out_layout or layout)
        self.copy = copy
        self._padding: Tensor | None = None
        self.padding = None if padding is None else _checked_padding(padding)

    @property
    def padding(self) -> Tensor | None:
        """How many tokens at the left of each row are padding."""
        return self._padding

    @padding.setter
    def padding(self, padding: Tensor | None) -> None:
        self._padding = padding
        self._row_padding = None if padding is None else tuple(padding.tolist())
        for layer in self.layers:
            layer.padding = self._row_padding

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
        """Append tokens to a layer and hand back, in order, all that the new ones may see; `copy` as in the cache."""
        keys, keys_back = to_torch(key_states)
        values, values_back = to_torch(value_states)
        if self.layout == "bshd" and keys.dim() == values.dim() == 4:  # a layer refuses any other
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        layer, missing = self._layer(layer_idx)
        self._check_padding(keys)
        if layer.needs_padding and self.padding is None and keys.dim() == 4 and keys.size(0) > 1:
            raise CacheError(
                f"{layer!r} keeps the first tokens of each row and got {keys.size(0)} rows: "
                "give the cache padding=[...], the padding at the left of each row (0 where there is none)"
            )
        if not layer.is_initialized:
            layer.token_major = not isinstance(key_states, Tensor)
        keys, values = layer.update(keys, values, cache_kwargs)
        self.layers.extend(missing)
        if self.out_layout == "bshd":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if self.copy if copy is None else copy:
            keys, values = keys.clone(), values.clone()
        return keys_back(keys), values_back(values)

    def append(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> View:
        """Append tokens to a layer and say what attention may read of it now; valid until the next change."""
        layer, missing = self._layer(layer_idx)
        self._check_padding(key_states)
        view = layer.append(key_states, value_states)
        self.layers.extend(missing)
        if self.padding is None:
            return view
        positions, seen = view.key_positions, layer.get_seq_length()
        if positions is None:
            slots = view.keys.size(2)
            positions = torch.arange(slots, device=key_states.device) + (seen - slots)
        return replace(view, key_positions=self._unpadded(positions))

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Where the next tokens stand: (tokens,), or (batch, tokens) with padding, which is negative."""
        seen = self.get_seq_length()
        return self._unpadded(torch.arange(tokens, device=device) + seen)  # `seen` is a tensor in compiled code

    def _unpadded(self, positions: Tensor) -> Tensor:
        if self._padding is None:
            return positions
        self._padding = self._padding.to(positions.device)
        return positions - self._padding[:, None]

    def _check_padding(self, key_states: Tensor) -> None:
        rows = self._row_padding
        if rows is not None and key_states.dim() == 4 and len(rows) != key_states.size(0):
            raise CacheError(
                f"padding: expected one count for each of the {key_states.size(0)} rows of the keys, got {len(rows)}"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens a layer was given, padding and what a window has left behind included."""
        layer_idx = checked_int("layer_idx", layer_idx)
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys the next `query_length` tokens will be handed, and the position of the first of them."""
        query_length, layer_idx = checked_int("query_length", query_length), checked_int("layer_idx", layer_idx)
        if layer_idx < len(self.layers):
            return self.layers[layer_idx].get_mask_sizes(query_length)
        coming = self._coming_layers()
        return coming[0].get_mask_sizes(query_length) if coming else (query_length, 0)

    def _coming_layers(self) -> list[CacheLayerMixin]:
        return [] if self.layer_class_to_replicate is None else [self.layer_class_to_replicate()]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the cache keeps, room for tokens to come included."""
        return sum(layer.nbytes for layer in self.layers)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, or take back the last `-length`; 0 takes back none (`reset` takes all)."""
        length = checked_int("length", length)
        for layer in self.layers:
            layer.check_crop(length)
        for layer in self.layers:
            layer.crop(length)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Make row i what row `index[i]` is; rows may be repeated or left out."""
        index = self._checked_rows(index)
        for layer in self.layers:
            layer.check_gather(index.numel())
        for layer in self.layers:
            layer.gather(index)
        if self.padding is not None:
            self.padding = self.padding[index.to(self.padding.device)]

    def repeat(self, count: int) -> None:
        """Make `count` rows of each, side by side."""
        count = checked_int("count", count, minimum=1)
        rows = self._rows()
        if rows is not None:
            self.reorder(torch.arange(rows).repeat_interleave(count))

    def reset(self) -> None:
        """Forget every token."""
        for layer in self.layers:
            layer.reset()

    def fork(self) -> Self:
        """A copy that goes on by itself: nothing done to one is seen in the other."""
        other = copying.copy(self)
        other.layers = [layer.fork() for layer in self.layers]
        return other

    def _layer(self, layer_idx: int) -> tuple[CacheLayerMixin, list[CacheLayerMixin]]:
        """The layer at `layer_idx`, and those that must be added for it to be there."""
        layer_idx = checked_int("layer_idx", layer_idx)
        if 0 <= layer_idx < len(self.layers):
            return self.layers[layer_idx], []
        if layer_idx < 0 or self.layer_class_to_replicate is None:
            raise CacheIndexError(
                f"layer_idx = {layer_idx} is no layer of a cache of {len(self.layers)}: "
                "build it with one layer for each of the model's"
            )
        missing = [self.layer_class_to_replicate() for _ in range(layer_idx + 1 - len(self.layers))]
        for layer in missing:
            layer.padding = self._row_padding
        return missing[-1], missing

    def _rows(self) -> int | None:
        sizes = (layer.batch_size for layer in self.layers)
        known = next((size for size in sizes if size is not None), None)
        return self.padding.numel() if known is None and self.padding is not None else known

    def _checked_rows(self, index: Tensor | Sequence[int]) -> Tensor:
        index = torch.as_tensor(index)
        if index.dim() != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise CacheError(f"rows are named by a list of whole numbers, not {tuple(index.shape)} of {index.dtype}")
        rows = self._rows()
        if rows is None or index.is_cuda:  # on a GPU, looking at the numbers would make the host wait
            return index
        strange = index[(index < 0) | (index >= rows)].tolist()
        if strange:
            raise CacheIndexError(f"row {strange[0]} is not in a cache of {rows} rows: they run from 0 to {rows - 1}")
        return index


def _checked_layout(name: str, layout: Layout) -> Layout:
    if layout not in get_args(Layout):
        raise ConfigError(f"{name} = {layout!r} is not known: give 'bhsd' or 'bshd'")
    return layout


def _checked_padding(padding: Tensor | Sequence[int]) -> Tensor:
    counts = torch.as_tensor(padding)
    if counts.dim() != 1 or counts.is_floating_point() or counts.dtype == torch.bool or bool((counts < 0).any()):
        raise ConfigError(f"padding = {padding} must be one count of tokens for each row")
    return counts.detach().to(torch.long, copy=True)  # the caller may write to its own tensor later
