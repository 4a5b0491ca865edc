"""One text after another over one cache: what a text begins with and the one before had is not read again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whimbrel.base.errors import CacheError
from whimbrel.cache import DynamicCache
from whimbrel.inference.decode import read_ids
from whimbrel.models import GPT

__all__ = ["Session"]


class Session:
    """A model and the cache of the text that it read last.

    `single` is for one text that goes on and takes nothing back but what the last `read` added: windows then hold no
    more than they see.
    """

    def __init__(self, model: GPT, *, cache: str = "none", single: bool = False) -> None:
        self.model, self._single = model, single
        self._codec = cache
        self._cache = DynamicCache(model.config, codec=cache)
        self._held: list[int] = []

    def read(self, ids: Sequence[int], keep: int = 1) -> Tensor:
        """The logits (keep, V) after each of the last `keep` tokens of a text that fits in the context."""
        self._rewind(min(_shared(self._held, ids), len(ids) - keep))
        if self._single:
            self._cache.crop(0)
        # Windows would let go of tokens that the next text, if it differs early enough, has to see again.
        self._cache.activate_past_recording()
        new = list(ids[len(self._held) :])
        logits_BTV = read_ids(self.model, torch.tensor([new]), self._cache, logits_to_keep=keep)
        self._held += new
        return logits_BTV[0]

    @property
    def held(self) -> int:
        """How many tokens the cache holds."""
        return len(self._held)

    def _rewind(self, length: int) -> None:
        """Keep the first tokens only; none, where a window has let go of what the next one would see."""
        try:
            if 0 < length < len(self._held):
                self._cache.crop(length)
        except CacheError:
            length = 0
        if not length:
            self._cache = DynamicCache(self.model.config, codec=self._codec)
        del self._held[length:]


def _shared(one: list[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    if list(other[: len(one)]) == one:
        return len(one)
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
