"""Loss on held-out data: a mean over tokens, accumulated over batches, and metrics derived from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whimbrel.models.gpt import GPT, IGNORE_INDEX
from whimbrel.models.layers import eval_mode

__all__ = ["HeldOutLoss", "LossAccumulator", "held_out_loss", "perplexity"]


def perplexity(loss: float) -> float:
    """The exponential of a mean loss in nats; inf instead of an OverflowError."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """The summed loss of `num_tokens` tokens."""

    loss_sum: float
    """In nats."""
    num_tokens: int

    @property
    def loss(self) -> float:
        """The mean loss in nats per token; NaN without tokens."""
        return self.loss_sum / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss."""
        return perplexity(self.loss)

    @property
    def bits_per_token(self) -> float:
        """The mean loss in bits; NaN without tokens."""
        return self.loss_sum / math.log(2) / self.num_tokens if self.num_tokens else math.nan

    def bits_per_byte(self, num_bytes: int) -> float:
        """The loss in bits per byte of the text, which is comparable across tokenizers."""
        return self.loss_sum / math.log(2) / num_bytes


class LossAccumulator:
    """Accumulates batch losses, weighted by number of tokens.

    Sums stay on the device in fp64 until `result`: no synchronization per batch, and summing many fp32 batch
    losses does not lose precision.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, loss_sum: Tensor, num_tokens: Tensor) -> None:
        """Add a batch: its loss summed over `num_tokens` tokens."""
        batch = torch.stack((loss_sum.double(), num_tokens.double()))
        self._total = batch if self._total is None else self._total + batch

    def add_mean(self, loss: Tensor, num_tokens: Tensor) -> None:
        """Add a batch by its mean loss; a mean over no tokens (NaN) counts as zero."""
        self.add(torch.where(num_tokens > 0, loss * num_tokens, 0.0), num_tokens)

    def result(self) -> HeldOutLoss | None:
        """The loss of all batches; None if there were none."""
        if self._total is None:
            return None
        loss_sum, num_tokens = self._total.tolist()
        return HeldOutLoss(loss_sum, int(num_tokens))


@torch.inference_mode()
def held_out_loss(model: GPT, batches: Iterable[Mapping[str, Any]]) -> HeldOutLoss:
    """The loss of a model over batches with `input_ids`, `targets` and other arguments of `GPT.forward`."""
    total = LossAccumulator()
    with eval_mode(model):
        for batch in batches:
            output = model(**batch, num_items_in_batch=1.0)
            total.add(output.loss, (batch["targets"] != IGNORE_INDEX).sum())
    return total.result() or HeldOutLoss(0.0, 0)
