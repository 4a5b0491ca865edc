"""A cache that grows with the text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whimbrel.ops import View

__all__ = ["DynamicCache", "DynamicLayer"]

SMALLEST_ROOM = 64
"""Tokens that the first allocation of a layer has room for."""


class DynamicLayer:
    """The keys and values of one layer, (batch, heads, tokens, head size).

    Tokens are written into a buffer that doubles when it is full, so appending costs O(1) on average; `keys` and
    `values` are views of the part in use. Dtype and device are those of the first update.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._buffers: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return type(self).__name__

    def get_seq_length(self) -> int:
        """How many tokens are stored."""
        return 0 if self.keys is None else self.keys.size(2)

    @torch.no_grad()
    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append tokens and hand back all of them. A growing layer has no settings: `cache_kwargs` pass it by."""
        start = self.get_seq_length()
        end = start + key_states.size(2)
        keys, values = self._room(key_states, value_states, end)
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def _room(self, key_states: Tensor, value_states: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Buffers with room for `tokens`; larger ones take over what the old ones hold."""
        if self._buffers is not None and self._buffers[0].size(2) >= tokens:
            return self._buffers
        room = max(SMALLEST_ROOM, 1 << (tokens - 1).bit_length())
        grown = _empty_like(key_states, room), _empty_like(value_states, room)
        if self.keys is not None and self.values is not None:
            for buffer, held in zip(grown, (self.keys, self.values), strict=True):
                buffer[:, :, : held.size(2)] = held
        self._buffers = grown
        return grown


class DynamicCache:
    """One `DynamicLayer` per layer of a model; layers appear as they are first written."""

    def __init__(self) -> None:
        self.layers: list[DynamicLayer] = []

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Append tokens to layer `layer_idx` and hand back all it holds."""
        while len(self.layers) <= layer_idx:
            self.layers.append(DynamicLayer())
        return self.layers[layer_idx].update(key_states, value_states, cache_kwargs)

    def append(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> View:
        """Append tokens to a layer and say what attention may read."""
        return View(*self.update(key_states, value_states, layer_idx))

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Where the next tokens stand."""
        seen = self.get_seq_length()
        return torch.arange(seen, seen + tokens, device=device)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens layer `layer_idx` has stored."""
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0


def _empty_like(states: Tensor, tokens: int) -> Tensor:
    batch, heads, _, size = states.shape
    return states.new_empty((batch, heads, tokens, size))
