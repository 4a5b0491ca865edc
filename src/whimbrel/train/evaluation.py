"""Loss, predictions and metrics on held-out batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from whimbrel.base.errors import DataError
from whimbrel.models import IGNORE_INDEX
from whimbrel.precision import PrecisionPlan
from whimbrel.train.outputs import Objective, logits_from_outputs

__all__ = [
    "EvalPrediction",
    "Evaluation",
    "Prediction",
    "computed_metrics",
    "evaluate_batches",
    "label_names_of",
    "labels_of",
    "select_predictions",
]

Step = Callable[[Any], tuple[Tensor | None, Any, Any]]
"""A batch to its mean loss, logits and labels, each of which may be None."""


class Prediction(NamedTuple):
    """Logits and labels of a dataset, in its order, and what was measured on the way."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class EvalPrediction:
    """The argument of `compute_metrics`: NumPy arrays (or tuples of them) as attributes; unpacks as a pair."""

    inputs: None = None
    losses: None = None

    def __init__(self, predictions: Any, label_ids: Any) -> None:
        self.predictions, self.label_ids = predictions, label_ids

    def __iter__(self) -> Iterator[Any]:
        return iter((self.predictions, self.label_ids))

    def __getitem__(self, place: int) -> Any:
        return (self.predictions, self.label_ids)[place]


class Evaluation(NamedTuple):
    """The mean loss over all targets (None if no batch has one), and predictions and labels if they were gathered."""

    loss: float | None
    predictions: Any
    label_ids: Any


def evaluate_batches(
    objective: Objective,
    batches: Iterable[Any],
    precision: PrecisionPlan,
    *,
    tell: Callable[[], object],
    limit: int | None = None,
    step: Step | None = None,
    gather: bool = False,
    preprocess: Callable[[Any, Any], Any] | None = None,
) -> Evaluation:
    """Evaluate at most `limit` batches; with `gather`, `step` returns the loss, logits and labels.

    Sequences of unequal length are padded with -100, as in transformers.
    """
    predictions, labels, mean = [], [], _Mean(weighs=step is not None or objective.compute is not None)
    with _evaluating(objective.model):
        for batch in itertools.islice(batches, limit):
            batch_logits = batch_labels = None
            with precision.autocast():
                if step is None:
                    count = objective.count(batch)
                    loss: Tensor | None = objective.loss(batch, mean.divisor(count), count)
                else:
                    loss, batch_logits, batch_labels = step(batch)
                    count = objective.count(batch)
            if loss is not None:
                mean.add(loss.mean(), count)
            if gather and batch_logits is not None:
                if preprocess is not None:
                    batch_logits = preprocess(batch_logits, batch_labels)
                predictions.append(_to_host(batch_logits))
            if gather and batch_labels is not None:
                labels.append(_to_host(batch_labels))
            tell()
    return Evaluation(mean.value, _join(predictions) if predictions else None, _join(labels) if labels else None)


def computed_metrics(compute_metrics: Callable[[Any], Mapping[str, Any]], evaluation: Evaluation) -> dict[str, Any]:
    """The metrics that the user's function returns, as Python numbers."""
    arrays = EvalPrediction(_to_numpy(evaluation.predictions), _to_numpy(evaluation.label_ids))
    found = compute_metrics(arrays)
    if not isinstance(found, Mapping):
        raise DataError(f"expected a dict of metrics from compute_metrics, got {type(found).__name__}: return a dict")
    return {
        key: value.item() if hasattr(value, "item") and np.size(value) == 1 else value for key, value in found.items()
    }


def label_names_of(forward: Iterable[str], model_name: str) -> tuple[str, ...]:
    """The arguments of `forward` that are labels by their names, found as in transformers."""
    spans = ("start_positions", "end_positions") if "QuestionAnswering" in model_name else ()
    return tuple(name for name in forward if "label" in name or name in spans) or ("labels",)


def labels_of(batch: Any, names: Sequence[str]) -> Any:
    """The labels of a batch: a tensor, a tuple if there are several, or None."""
    if not isinstance(batch, Mapping):
        return batch[1]
    found = tuple(batch[name] for name in names if batch.get(name) is not None)
    return found[0] if len(found) == 1 else found or None


def select_predictions(outputs: Any, ignore_keys: Sequence[str]) -> Any:
    """The outputs without the loss and `ignore_keys`: a tensor, or a tuple if there are several."""
    if isinstance(outputs, Mapping):
        ignored = {"loss", *ignore_keys}
        kept = [value for key, value in outputs.items() if key not in ignored and _has_tensors(value)]
        if kept:
            return kept[0] if len(kept) == 1 else tuple(kept)
    return logits_from_outputs(outputs)


class _Mean:
    """A mean over the targets of many batches, summed where they are until someone asks."""

    def __init__(self, *, weighs: bool) -> None:
        self._weighs = weighs
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
    def value(self) -> float | None:
        """The mean; None if there was no loss."""
        return None if self._total is None else float(self._total[0] / self._total[1])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(_has_tensors(part) for part in value)
    return isinstance(value, Tensor)


def _map(function: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _map(function, part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_map(function, part) for part in value)
    return function(value) if isinstance(value, Tensor) else value


def _to_host(value: Any) -> Any:
    """Move tensors to the CPU, at least one-dimensional and in a dtype that NumPy supports."""

    def move(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu()
        tensor = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
        return tensor.reshape(1) if tensor.ndim == 0 else tensor

    return _map(move, value)


def _to_numpy(value: Any) -> Any:
    return _map(lambda tensor: tensor.numpy(), value)


def _join(parts: list[Any]) -> Any:
    """Concatenate the predictions or labels of all batches, padding the second dimension with -100 if it differs."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _join([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(_join([part[place] for part in parts]) for place in range(len(first)))
    if not isinstance(first, Tensor):
        raise DataError(f"expected predictions and labels as tensors, got {type(first).__name__}")
    longest = max((part.shape[1] for part in parts if part.ndim > 1), default=0)
    padded = []
    for part in parts:
        if part.ndim > 1 and part.shape[1] < longest:
            padding = part.new_full((part.shape[0], longest - part.shape[1], *part.shape[2:]), IGNORE_INDEX)
            part = torch.cat((part, padding), dim=1)
        padded.append(part)
    return torch.cat(padded)
