"""What is measured of a model that is finalized."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from whimbrel.models import GPT

__all__ = ["Finalized", "Measure", "Measured", "Weights"]


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean loss of a model on a text that it was not trained on."""

    loss: float
    tokens: int
    length: int
    """Tokens of a sequence: later tokens of one have more to go by."""
    text: str
    """What the text is, for people."""

    @property
    def perplexity(self) -> float:
        """Among how many tokens the model is as good as undecided."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


Measure = Callable[[GPT], Measured]
"""Measures a model."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a directory: what they are, the bytes of their files, and the loss of the model they make."""

    format: str
    bytes: int
    measured: Measured | None


@dataclass(frozen=True, slots=True)
class Finalized:
    """What became of a model."""

    recipe: str | None
    """What its linear layers are quantised as; None: they are plain."""
    parameters: int
    before: Weights
    after: Weights
    left: tuple[str, ...]
    """The linear layers of a quantised model that stayed plain."""
