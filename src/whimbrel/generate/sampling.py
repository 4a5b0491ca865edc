"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whimbrel.base.errors import RequestError

__all__ = ["Sampling", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is drawn."""

    temperature: float = 1.0
    """Above 1 flattens the distribution, below 1 sharpens it; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw from the `top_k` likeliest tokens only."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens that together have probability `top_p`."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature = {self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise RequestError(f"top_k = {self.top_k} must be at least 1: leave it out to draw from all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RequestError(f"top_p = {self.top_p} must be above 0 and at most 1")


def sample(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token. It is drawn on the CPU, so that a seed means the same on every device."""
    logits = logits_V.float().cpu()
    if logits.isnan().any():
        raise RequestError("the model's logits are not numbers: its weights are damaged, or its training diverged")
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    probabilities = (logits / sampling.temperature).softmax(-1)
    if sampling.top_p is not None:
        ordered, tokens = probabilities.sort(descending=True)
        kept = ordered.cumsum(-1) - ordered < sampling.top_p
        probabilities = torch.zeros_like(probabilities).scatter(0, tokens, ordered * kept)
    return int(probabilities.multinomial(1, generator=generator))
