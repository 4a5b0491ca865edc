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
    """The mean over all targets of at most `limit` batches, or over their samples where they have no labels."""
    mean = _Mean(objective)
    with _evaluating(objective.model):
        for batch in itertools.islice(batches, limit):
            with precision.autocast():
                count = objective.count(batch)
                loss = objective.loss(batch, mean.divisor(count), count)
            mean.add(loss, count)
            tell()
    return mean.value


def predictions(
    objective: Objective, batches: Iterable[Any], precision: PrecisionPlan, tell: Callable[[], object]
) -> tuple[Tensor, Tensor | None, float | None]:
    """All logits and labels, on the host, and the mean loss; without labels both are None.

    Sequences of unequal length are filled up, labels with -100.
    """
    logits, labels, mean = [], [], _Mean(objective)
    with _evaluating(objective.model):
        for batch in batches:
            with precision.autocast():
                count = objective.count(batch)
                batch_logits, batch_labels, loss = objective.scored(batch, mean.divisor(count), count)
            logits.append(batch_logits.float().cpu())
            if batch_labels is not None and loss is not None:
                labels.append(batch_labels.cpu())
                mean.add(loss, count)
            tell()
    return _join(logits, 0.0), _join(labels, -100) if labels else None, mean.value if labels else None


class _Mean:
    """A mean over the targets of many batches, summed where they are until someone asks."""

    def __init__(self, objective: Objective) -> None:
        self._weighs = objective.compute is not None
        self._total: Tensor | None = None

    def divisor(self, count: Tensor) -> Tensor:
        """What to divide a batch's loss by: a function of the user's own may return a mean whatever it is told."""
        return count.clamp(min=1) if self._weighs else torch.ones_like(count)

    def add(self, loss: Tensor, count: Tensor) -> None:
        """Take in a batch."""
        if self._weighs:
            loss = torch.where(count > 0, loss * count, 0.0)
        part = torch.stack((loss.double(), count.double()))
        self._total = part if self._total is None else self._total + part

    @property
    def value(self) -> float:
        """The mean; nan where nothing came."""
        return float("nan") if self._total is None else float(self._total[0] / self._total[1])


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
