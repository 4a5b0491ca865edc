"""Loss and predictions on held-out batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from whimbrel.precision import PrecisionPlan
from whimbrel.train.outputs import Objective

__all__ = ["Prediction", "mean_loss", "predictions"]


class Prediction(NamedTuple):
    """Logits and labels of a dataset, in its order, and what was measured on the way."""

    predictions: Tensor
    label_ids: Tensor | None
    metrics: dict[str, float]


def mean_loss(
    objective: Objective,
    batches: Iterable[Any],
    precision: PrecisionPlan,
    limit: int | None,
    tell: Callable[[], object],
) -> float:
    """The mean over all targets of at most `limit` batches, whatever the size of a batch."""
    total: Tensor | None = None
    with _evaluating(objective.model):
        for batch in itertools.islice(batches, limit):
            count = objective.count(batch)
            with precision.autocast():
                loss = objective.loss(batch, torch.ones_like(count), count)
            part = torch.stack((loss.double(), count.double()))
            total = part if total is None else total + part
            tell()
    return float("nan") if total is None else float(total[0] / total[1])


def predictions(
    objective: Objective, batches: Iterable[Any], precision: PrecisionPlan, tell: Callable[[], object]
) -> tuple[Tensor, Tensor | None]:
    """All logits and labels, on the host; sequences of unequal length are filled up, labels with -100."""
    logits, labels = [], []
    with _evaluating(objective.model):
        for batch in batches:
            with precision.autocast():
                batch_logits, batch_labels = objective.logits(batch)
            logits.append(batch_logits.float().cpu())
            if batch_labels is not None:
                labels.append(batch_labels.cpu())
            tell()
    return _join(logits, 0.0), _join(labels, -100) if labels else None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _join(parts: list[Tensor], fill: float) -> Tensor:
    longest = max((part.shape[1] for part in parts if part.ndim > 1), default=0)
    padded = []
    for part in parts:
        if part.ndim > 1 and part.shape[1] < longest:
            room = part.new_full((part.shape[0], longest - part.shape[1], *part.shape[2:]), fill)
            part = torch.cat((part, room), dim=1)
        padded.append(part)
    return torch.cat(padded) if padded else torch.empty(0)
