"""Multi-token prediction: early in training, each position also predicts the tokens after the next one.

Unlike the heads of Gloeckle et al. (2024), the same logits predict all of these tokens (as in modded-nanogpt): the loss
is the cross-entropy with the next token plus weighted cross-entropies with the second, third, ... next token. The
weights decrease to 0, so that the model ends as a next-token predictor. This is the loss that validation and the log
report all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError
from whimbrel.distributed import unwrap
from whimbrel.models import IGNORE_INDEX
from whimbrel.ops import linear_multi_token_cross_entropy
from whimbrel.train.objectives import Batch, LossOutput, ModelObjective
from whimbrel.train.run_config import RunConfig

__all__ = ["MultiTokenObjective", "multi_token_objective", "multi_token_targets"]


@dataclass(slots=True)
class MultiTokenObjective(ModelObjective):
    """The loss of a `GPT` on pairs `(idx, targets)`; in eval mode, that of `ModelObjective`."""

    weights: tuple[float, ...] = ()
    """The initial weights of the second, third, ... next token; that of the next token is 1."""
    until: float = 1.0
    """The fraction of the run after which they are 0."""
    documents: Callable[[Tensor], Tensor] | None = None
    """The document numbers of inputs (batch, tokens): predictions end with their document."""
    _current: tuple[float, ...] = field(init=False)
    """The weights above 0 in this step."""

    def __post_init__(self) -> None:
        for weight in self.weights:
            if not 0 < weight < float("inf"):
                raise ConfigError(f"expected objective.mtp_weights above 0, got {weight}")
        if not 0 < self.until <= 1:
            raise ConfigError(f"expected objective.mtp_until above 0 and at most 1, got {self.until}")
        self._current = self.weights

    def start_step(self, progress: float) -> None:
        """Each weight decreases linearly to 0 in its share of the time, that of the furthest token first."""
        count, decreased = len(self.weights), progress / self.until * len(self.weights)
        factors = [min(1.0, max(0.0, count - index - decreased)) for index in range(count)]
        self._current = tuple(w * factor for w, factor in zip(self.weights, factors, strict=True) if factor > 0)

    def __call__(self, model: nn.Module, batch: Batch, num_items: Tensor, *, with_logits: bool = False) -> LossOutput:
        """The weighted sum in training; the loss of the next token is the one to log."""
        if not model.training or not self._current or isinstance(batch, Mapping):
            return ModelObjective.__call__(self, model, batch, num_items, with_logits=with_logits)
        x, targets = batch
        config: Any = unwrap(model).config
        documents = None if self.documents is None else self.documents(x)
        targets_NK = multi_token_targets(targets, len(self._current) + 1, documents).flatten(0, 1)
        # torch.tensor would wait for the GPU.
        weights_K = torch.cat([torch.full((1,), weight, device=x.device) for weight in (1.0, *self._current)])

        def loss_fn(hidden: Tensor, weight: Tensor) -> Tensor:
            total, sums_K = linear_multi_token_cross_entropy(
                hidden, weight, targets_NK, weights_K, vocab_size=config.vocab_size, softcap=config.logit_softcap
            )
            return torch.stack((total, sums_K[0]))

        outputs = model(x, loss_fn=loss_fn, return_logits=with_logits, **self.forward_kwargs(x))
        loss, next_token_loss = outputs.loss / num_items
        return LossOutput(loss, outputs._replace(loss=next_token_loss), logged=next_token_loss)


def multi_token_objective(
    config: RunConfig, attended: Callable[[Tensor], Tensor | None], documents: Callable[[Tensor], Tensor]
) -> MultiTokenObjective | None:
    """The objective with `objective.mtp_weights`; None without them.

    `attended` and `documents` number the documents of inputs: for attention (None if it may cross them), and for
    predictions.
    """
    settings = config.objective
    if not settings.mtp_weights:
        return None
    return MultiTokenObjective(
        None,
        lambda x: {"documents": attended(x)},
        weights=settings.mtp_weights,
        until=settings.mtp_until,
        documents=documents,
    )


def multi_token_targets(targets_BT: Tensor, count: int, documents_BT: Tensor | None) -> Tensor:
    """The next `count` targets of each position (batch, tokens, count), from those of the next token.

    Targets beyond the sequence are ignored, and those whose preceding input is in another document.
    """
    columns = [targets_BT]
    for offset in range(1, count):
        later = targets_BT[:, offset:]
        if documents_BT is not None:
            crosses = documents_BT[:, offset:] != documents_BT[:, :-offset]
            later = later.masked_fill(crosses, IGNORE_INDEX)
        columns.append(F.pad(later, (0, targets_BT.shape[1] - later.shape[1]), value=IGNORE_INDEX))
    return torch.stack(columns, dim=-1)
