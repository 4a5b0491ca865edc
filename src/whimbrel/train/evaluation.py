"""Loss, predictions and metrics on held-out batches, and the metric that decides which checkpoint is best."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.distributed import World
from whimbrel.models import IGNORE_INDEX
from whimbrel.models.held_out_loss import HeldOutLoss, LossAccumulator
from whimbrel.models.layers import eval_mode
from whimbrel.precision import MixedPrecision
from whimbrel.train.objectives import ComputeLossObjective, DummyBatch, Objective, logits_from_outputs

__all__ = [
    "EvalLoopOutput",
    "EvalPrediction",
    "PredictionOutput",
    "call_compute_metrics",
    "evaluate_batches",
    "find_metric",
    "get_labels",
    "greater_is_better",
    "has_metric",
    "infer_label_names",
    "select_predictions",
]

PredictionStep = Callable[[Any], tuple[Tensor | None, Any, Any]]
"""A `prediction_step`: from a batch to its mean loss, logits and labels, each of which may be None."""


class PredictionOutput(NamedTuple):
    """Predictions and labels of a dataset in its order, and the metrics computed from them."""

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

    def __getitem__(self, index: int) -> Any:
        return (self.predictions, self.label_ids)[index]


class EvalLoopOutput(NamedTuple):
    """The mean loss over all targets of all ranks (None if no batch has one), predictions and labels if they were
    gathered, and the means of the objective's metrics; equal on every rank.
    """

    loss: float | None
    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


def evaluate_batches(
    objective: Objective,
    model: nn.Module,
    batches: Iterable[Any],
    precision: MixedPrecision,
    world: World,
    *,
    on_batch: Callable[[], object],
    limit: int | None = None,
    step: PredictionStep | None = None,
    gather: bool = False,
    preprocess: Callable[[Any, Any], Any] | None = None,
) -> EvalLoopOutput:
    """Evaluate at most `limit` batches in eval mode, calling `on_batch` after each.

    `step` replaces the objective. With `gather` it also returns predictions and labels, which are concatenated on the
    CPU in the order of the data; sequences of unequal length are padded with -100, as in transformers.

    Every data rank evaluates its slice of each batch; all have the same number of batches.
    """
    parts: list[tuple[Any, Any]] = []
    """Predictions and labels of each batch; None without them."""
    total, metrics = LossAccumulator(), dict[str, LossAccumulator]()
    # A custom loss function may return a mean and ignore the divisor.
    has_custom_loss = isinstance(objective, ComputeLossObjective) or getattr(objective, "loss_func", None) is not None
    is_mean = step is not None or has_custom_loss
    with eval_mode(model):
        for item in itertools.islice(batches, limit):
            batch, counts = (item.batch, False) if isinstance(item, DummyBatch) else (item, True)
            batch_logits = batch_labels = None
            with precision.autocast():
                if step is None:
                    count = objective.count(model, batch)
                    divisor = count.clamp(min=1) if is_mean else torch.ones_like(count)
                    loss, _, extra, _ = objective(model, batch, divisor)
                else:
                    loss, batch_logits, batch_labels = step(batch)
                    count, extra = objective.count(model, batch), {}
            if loss is not None and counts:
                (total.add_mean if is_mean else total.add)(loss.mean(), count)
                for name, value in extra.items():
                    metrics.setdefault(name, LossAccumulator()).add(value, count)
            if gather and preprocess is not None and batch_logits is not None:
                batch_logits = preprocess(batch_logits, batch_labels)
            if gather:
                parts.append((_to_host(batch_logits), _to_host(batch_labels)) if counts else (None, None))
            on_batch()
    sums = {name: value.result() for name, value in metrics.items()}
    return _combine(world.all_gather_dp((total.result(), parts, sums)))


def _combine(
    ranks: list[tuple[HeldOutLoss | None, list[tuple[Any, Any]], dict[str, HeldOutLoss | None]]],
) -> EvalLoopOutput:
    """Loss and metrics of all ranks together; predictions and labels batch by batch, in the order of ranks."""
    losses = [loss for loss, _, _ in ranks if loss is not None]
    names = list(dict.fromkeys(name for _, _, metrics in ranks for name in metrics))
    ordered = [part for batch in zip(*(parts for _, parts, _ in ranks), strict=True) for part in batch]
    predictions, labels = ([part[i] for part in ordered if part[i] is not None] for i in (0, 1))
    return EvalLoopOutput(
        _sum(losses).loss if losses else None,
        _concatenate(predictions) if predictions else None,
        _concatenate(labels) if labels else None,
        {name: _sum([metrics.get(name) for _, _, metrics in ranks]).loss for name in names},
    )


def _sum(parts: Sequence[HeldOutLoss | None]) -> HeldOutLoss:
    """The sum over all ranks of a loss or metric, and its number of targets."""
    found = [part for part in parts if part is not None]
    return HeldOutLoss(sum(part.loss_sum for part in found), sum(part.num_tokens for part in found))


def call_compute_metrics(
    compute_metrics: Callable[[Any], Mapping[str, Any]], evaluation: EvalLoopOutput
) -> dict[str, Any]:
    """Call the user's `compute_metrics` and convert one-element tensors and arrays to Python numbers."""
    arrays = EvalPrediction(_to_numpy(evaluation.predictions), _to_numpy(evaluation.label_ids))
    metrics = compute_metrics(arrays)
    if not isinstance(metrics, Mapping):
        raise DataError(f"expected a dict of metrics from compute_metrics, got {type(metrics).__name__}: return a dict")
    return {
        key: value.item() if hasattr(value, "item") and np.size(value) == 1 else value for key, value in metrics.items()
    }


def infer_label_names(parameters: Iterable[str], model_name: str) -> tuple[str, ...]:
    """The parameters of a model's forward that look like labels by name, as in transformers."""
    spans = ("start_positions", "end_positions") if "QuestionAnswering" in model_name else ()
    return tuple(name for name in parameters if "label" in name or name in spans) or ("labels",)


def get_labels(batch: Any, names: Sequence[str]) -> Any:
    """The labels of a batch: a tensor, a tuple if there are several, or None."""
    if not isinstance(batch, Mapping):
        return batch[1]
    labels = tuple(batch[name] for name in names if batch.get(name) is not None)
    return labels[0] if len(labels) == 1 else labels or None


def select_predictions(outputs: Any, ignore_keys: Sequence[str]) -> Any:
    """The outputs without the loss and `ignore_keys`: a tensor, or a tuple if there are several."""
    if isinstance(outputs, Mapping):
        ignored = {"loss", *ignore_keys}
        kept = [value for key, value in outputs.items() if key not in ignored and _has_tensors(value)]
        if kept:
            return kept[0] if len(kept) == 1 else tuple(kept)
    return logits_from_outputs(outputs)


def find_metric(metrics: Mapping[str, Any], name: str) -> float:
    """The metric `name`, or else `eval_{name}`; raises ConfigError if there is neither."""
    for key in (name, f"eval_{name}"):
        if key in metrics:
            return float(metrics[key])
    raise ConfigError(f"unknown metric '{name}' (choose from: {', '.join(sorted(metrics))})")


def has_metric(metrics: Container[str], name: str) -> bool:
    """Whether there is a metric with that name, with or without the `eval_` prefix."""
    return name in metrics or f"eval_{name}" in metrics


def greater_is_better(name: str, setting: bool | None = None) -> bool:
    """`setting` if it is not None; otherwise false for names that contain loss or perplexity."""
    return setting if setting is not None else not any(part in name for part in ("loss", "perplexity"))


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


def _concatenate(parts: list[Any]) -> Any:
    """Concatenate the predictions or labels of all batches, padding the second dimension with -100 if it differs."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _concatenate([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(_concatenate([part[index] for part in parts]) for index in range(len(first)))
    if not isinstance(first, Tensor):
        raise DataError(f"expected predictions and labels as tensors, got {type(first).__name__}")
    max_length = max((part.shape[1] for part in parts if part.ndim > 1), default=0)
    padded = []
    for part in parts:
        if part.ndim > 1 and part.shape[1] < max_length:
            padding = part.new_full((part.shape[0], max_length - part.shape[1], *part.shape[2:]), IGNORE_INDEX)
            part = torch.cat((part, padding), dim=1)
        padded.append(part)
    return torch.cat(padded)
