"""The names by which `transformers` asks for what a cache does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from whimbrel.cache.layer import CacheLayerMixin

__all__ = ["TransformersSpelling"]


class TransformersSpelling(ABC):
    """What models and `generate` of `transformers` call beside `update`, `crop` and the lengths."""

    layers: list[CacheLayerMixin]

    @abstractmethod
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens a layer was given."""

    @abstractmethod
    def _coming_layers(self) -> list[CacheLayerMixin]:
        """A layer like those that a model will add, if it can add any."""

    @abstractmethod
    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Make row i what row `index[i]` is."""

    @abstractmethod
    def repeat(self, count: int) -> None:
        """Make `count` rows of each."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on from the beams that won."""
        self.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.repeat(repeats)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the next token."""
        return self.get_seq_length(layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """How many tokens there is room for, in one layer or in the roomiest; -1 where there is no limit."""
        if layer_idx is None:
            return max((layer.get_max_length() for layer in self.layers), default=-1)
        return self.layers[layer_idx].get_max_length() if layer_idx < len(self.layers) else -1

    def activate_past_recording(self) -> None:
        """Keep, until the next `crop`, what windows would let go."""
        for layer in self.layers:
            layer.check_recording()
        for layer in self.layers:
            layer.activate_past_recording()

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a layer keeps what its window would let go."""
        return self.layers[layer_idx].record_past

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` of `transformers` may compile a model around this cache, and masks every single query.

        One layer is enough: it hands back slots without tokens, which have to be masked.
        """
        return any(layer.is_compileable for layer in self.layers or self._coming_layers())

    @property
    def is_croppable(self) -> bool:
        """Whether the newest tokens can always be taken back."""
        return all(layer.is_croppable for layer in self.layers)

    @property
    def is_initialized(self) -> bool:
        """Whether every layer has seen tokens."""
        return bool(self.layers) and all(layer.is_initialized for layer in self.layers)

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers see no further than a window."""
        return [layer.is_sliding for layer in self.layers]
