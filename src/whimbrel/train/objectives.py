"""Objectives compute the loss of a micro-batch and count its targets.

The loss of an optimizer step is one mean over all targets of its micro-batches, so micro-batches are weighted by their
targets. An objective therefore does two things: `count` the targets of a micro-batch, and compute its `loss`, divided
by the number of targets in the optimizer step (`num_items`). With `num_items = 1` the loss is the sum over the targets.
"""

from __future__ import annotations

import inspect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.distributed import unwrap
from whimbrel.models import IGNORE_INDEX

__all__ = [
    "ComputeLossObjective",
    "DummyBatch",
    "FunctionObjective",
    "LossOutput",
    "ModelObjective",
    "Objective",
    "ObjectiveFunction",
    "as_objective",
    "logits_from_outputs",
    "loss_and_logits_from_outputs",
    "loss_from_outputs",
    "scalar_loss",
    "zero_backward",
]

LossFunction = Callable[..., Tensor]
"""`(outputs, labels, num_items_in_batch=N) -> loss`: the sum over the batch's targets, divided by N."""
Batch = tuple[Tensor, Tensor] | Mapping[str, Any]
ObjectiveFunction = Callable[[nn.Module, Any], Any]
"""`(model, batch) -> loss_sum, count` or `loss_sum, count, metrics`: sums over the targets of the batch (tokens,
samples or pairs) and their number. The trainer divides by the number of targets in the optimizer step."""


class LossOutput(NamedTuple):
    """What an objective computes for one micro-batch."""

    loss: Tensor | None
    """Scalar: the sum over the targets, divided by `num_items`; None for a batch without labels."""
    outputs: Any = None
    """The model's outputs, for predictions."""
    metrics: Mapping[str, Tensor] = {}
    """Additional scalars to log, weighted like the loss: sums over the targets divided by `num_items`."""
    num_targets: Tensor | None = None
    """The number of targets, from an objective that knows it only after its forward pass: `FunctionObjective`."""


@dataclass(frozen=True, slots=True)
class DummyBatch:
    """A dummy batch with weight 0, for a rank whose slice of the global batch is empty: it must join collectives."""

    batch: Any


class zero_backward(TorchFunctionMode):  # noqa: N801 # a context, as torch.no_grad
    """In this context, backward passes run with losses times 0, wherever they are called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Change the losses of `Tensor.backward` and `torch.autograd.backward`."""
        if func is Tensor.backward:
            args = (args[0] * 0, *args[1:])
        elif func is torch.autograd.backward:
            args = ([loss * 0 for loss in args[0]], *args[1:])
        return func(*args, **(kwargs or {}))


class Objective(ABC):
    """Base class of objectives. A subclass implements `__call__`, and `count` if labels are not in `batch["labels"]`.

    Instances are passed to the trainer as `objective=`.
    """

    count_name: str | None = None
    """The name under which the number of targets of each step is logged; default: it is not logged."""
    columns: ClassVar[tuple[str, ...] | None] = ()
    """Columns of a `datasets.Dataset` that the objective reads, in addition to the inputs of the model and labels.
    Others are dropped (`remove_unused_columns`). None: unknown, so all are kept.
    """

    def count(self, model: nn.Module, batch: Batch) -> Tensor:
        """The number of targets of a micro-batch, as a scalar tensor: the weight of its loss in the step.

        Labels that are not -100; without labels, samples. Called under autocast.
        """
        targets = batch.get("labels") if isinstance(batch, Mapping) else _pair(batch)[1]
        return _count_targets(targets, batch, model)

    @abstractmethod
    def __call__(self, model: nn.Module, batch: Batch, num_items: Tensor, *, with_logits: bool = False) -> LossOutput:
        """The loss of a micro-batch, divided by `num_items`, the number of targets in the optimizer step.

        `with_logits`: the caller needs logits, which a model may omit to save memory.
        """


@dataclass(slots=True)
class ModelObjective(Objective):
    """The default objective: the model's own loss, or the token cross-entropy of its logits.

    A pair is `(idx, targets)`, targets already shifted. A mapping is passed as keyword arguments. `loss_func`
    replaces the model's own loss. A model that returns no loss gets token cross-entropy, shifted by one if `labels` are
    sequences.

    A step is weighted by targets, so the objective has to know which labels the model's own loss averages over: those
    that are not -100, except the first of a sequence if the loss predicts the next token. A model declares the latter
    with `loss_type = "ForCausalLM"`; generative decoder-only transformers models are recognized by `can_generate()`.
    For any other model it depends on whether the model returns a loss, which is known after its first forward pass.
    """

    loss_func: LossFunction | None = None
    forward_kwargs: Callable[[Tensor], dict[str, Any]] = lambda _: {}
    """Further keyword arguments of the model, computed from the inputs of a pair."""
    count_name: str | None = None
    counts_without_forward: bool = False
    """Never run the model to count targets, because an overridden method computes the loss."""
    _model: nn.Module | None = field(init=False, default=None)
    _shifts: bool | None = field(init=False, default=None)
    """Whether the model declares that it shifts labels; None if it declares nothing."""
    _returns_loss: bool | None = field(init=False, default=None)
    """Whether the model returns a loss for labels; None until its first forward pass with labels."""
    _parameters: frozenset[str] = field(init=False, default=frozenset())
    _has_var_kwargs: bool = field(init=False, default=False)
    _is_gpt: bool = field(init=False, default=False)
    """Whether the forward has the loss arguments of `GPT`: `targets` and `num_items_in_batch`."""
    _takes_targets: bool = field(init=False, default=False)
    _first_outputs: tuple[Batch, Any] | None = field(init=False, default=None)
    """The first batch with labels and its outputs, until `__call__` uses them."""

    def count(self, model: nn.Module, batch: Batch) -> Tensor:
        """The number of targets, or of samples in a batch without labels.

        If it is not known yet whether the model returns a loss, the first batch with labels is run through the model
        here and `__call__` uses these outputs: no forward pass is repeated.
        """
        self._inspect(model)
        undecided = self._returns_loss is None and self.loss_func is None and not self.counts_without_forward
        if undecided and isinstance(batch, Mapping) and "labels" in batch:
            # Evaluation may need logits later, training never does.
            logits = {} if torch.is_grad_enabled() else self._logits_kwargs()
            inputs = avoid_empty_targets(batch, _count_targets(batch["labels"], batch, model))
            outputs = model(**self._model_inputs(inputs), **logits)
            self._returns_loss = _has_loss(outputs)
            self._first_outputs = batch, outputs
        if not isinstance(batch, Mapping):
            targets: Tensor | None = _pair(batch)[1]
        else:
            targets = self._targets(batch["labels"]) if "labels" in batch else batch.get("targets")
        return _count_targets(targets, batch, model)

    def __call__(self, model: nn.Module, batch: Batch, num_items: Tensor, *, with_logits: bool = False) -> LossOutput:
        """The loss of a micro-batch, divided by `num_items`."""
        self._inspect(model)
        if self._is_gpt and self.loss_func is None:
            return self._gpt_loss(model, batch, num_items, with_logits)
        if isinstance(batch, Mapping):
            outputs, labels = self._forward_mapping(batch, with_logits)
        else:
            x, labels = _pair(batch)
            if self.loss_func is not None:
                outputs = model(x, **self.forward_kwargs(x))
            else:
                targets = avoid_empty_targets((x, labels), self.count(model, batch))[1]
                outputs = model(x, targets) if self._takes_targets else model(x)
        return LossOutput(self._loss(model, batch, outputs, labels, num_items), outputs)

    def _gpt_loss(self, model: nn.Module, batch: Batch, num_items: Tensor, with_logits: bool) -> LossOutput:
        """GPT divides its loss by `num_items` itself, and computes it without logits unless they are needed."""
        logits = self._logits_kwargs() if with_logits else {}
        if isinstance(batch, Mapping):
            inputs = {"return_logits": False, **self._model_inputs(batch), **logits}
            outputs = model(**inputs, num_items_in_batch=num_items)
        else:
            x, targets = _pair(batch)
            outputs = model(x, targets=targets, num_items_in_batch=num_items, **logits, **self.forward_kwargs(x))
        if outputs.loss is None:
            raise _missing_loss(model)
        return LossOutput(outputs.loss, outputs)

    def stage_inputs(self, model: nn.Module, batch: Batch | DummyBatch) -> dict[str, Any]:
        """The batch as a micro-batch of a pipeline: `input_ids`, `targets` (shifted) and further inputs."""
        self._inspect(model)
        if isinstance(batch, DummyBatch):
            inputs = self.stage_inputs(model, batch.batch)
            return inputs | {"targets": torch.full_like(inputs["targets"], IGNORE_INDEX)}
        if not isinstance(batch, Mapping):
            x, targets = _pair(batch)
            return {"input_ids": x, "targets": targets, **self.forward_kwargs(x)}
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        if "labels" in batch:
            inputs["targets"] = self._targets(batch["labels"])
        if "targets" not in inputs:
            raise DataError("expected labels in the batches of a pipeline, got none: add labels")
        return inputs

    def predict(self, model: nn.Module, batch: Mapping[str, Any], num_items: Tensor) -> LossOutput:
        """Outputs with logits of a batch without labels, and the loss if the outputs contain one."""
        self._inspect(model)
        outputs, _ = self._forward_mapping(batch, with_logits=True)
        has_loss = output_field(outputs, "loss") is not None
        return LossOutput(self._loss(model, batch, outputs, None, num_items) if has_loss else None, outputs)

    def _inspect(self, model: nn.Module) -> None:
        """Read the signature of the model's forward, once."""
        if self._model is model:
            return
        inner = unwrap(model)
        parameters = inspect.signature(inner.forward).parameters
        self._model, self._first_outputs = model, None
        self._shifts = _shifts_labels(inner)
        self._parameters = frozenset(parameters)
        self._is_gpt = {"targets", "num_items_in_batch", "return_logits"} <= self._parameters
        self._has_var_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._takes_targets = next(itertools.islice(parameters, 1, None), "") in ("targets", "target", "labels", "y")
        takes_labels = self._has_var_kwargs or "labels" in parameters
        self._returns_loss = None if takes_labels and self._shifts is None else takes_labels

    def _forward_mapping(self, batch: Mapping[str, Any], with_logits: bool) -> tuple[Any, Tensor | None]:
        """The model's outputs, and the labels for a loss computed from them."""
        assert self._model is not None
        labels = batch.get("labels")
        if self._first_outputs is not None and self._first_outputs[0] is batch:
            outputs, self._first_outputs = self._first_outputs[1], None
        else:
            if self.loss_func is not None:
                inputs = {key: value for key, value in batch.items() if key != "labels"}
            else:
                inputs = avoid_empty_targets(batch, _count_targets(self._targets(labels), batch, self._model))
            outputs = self._model(**self._model_inputs(inputs), **(self._logits_kwargs() if with_logits else {}))
            if self._returns_loss is None and labels is not None and self.loss_func is None:
                self._returns_loss = _has_loss(outputs)
        return outputs, labels if self.loss_func is not None else self._targets(labels)

    def _loss(self, model: nn.Module, batch: Batch, outputs: Any, labels: Tensor | None, num_items: Tensor) -> Tensor:
        if self.loss_func is not None:
            return self.loss_func(outputs, labels, num_items_in_batch=num_items)
        if _has_loss(outputs):
            return weighted_mean(loss_from_outputs(outputs), self.count(model, batch), num_items)
        if labels is None:
            raise _missing_loss(model)
        return _cross_entropy(logits_from_outputs(outputs), labels) / num_items

    def _model_inputs(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch as keyword arguments of the model, without labels that its forward does not accept."""
        if self._has_var_kwargs:
            return batch
        if unknown := [key for key in batch if key not in self._parameters and key != "labels"]:
            raise DataError(
                f"expected the inputs of {type(self._model).__name__} ({', '.join(sorted(self._parameters))}), got "
                f"'{unknown[0]}' in the batch: rename the column, drop it, or pass a data_collator"
            )
        return {key: value for key, value in batch.items() if key in self._parameters}

    def _logits_kwargs(self) -> dict[str, bool]:
        return {"return_logits": True} if "return_logits" in self._parameters else {}

    def _targets(self, labels: Tensor | None) -> Tensor | None:
        """The labels aligned with the logits: shifted by one for next-token prediction."""
        if labels is None:
            return None
        if self._shifts is not None:
            shifts = self._shifts and labels.ndim > 1
        else:  # logits only: token ids of sequences are scored against the next token
            is_sequence = labels.ndim == 2 and labels.shape[1] > 1 and not labels.is_floating_point()
            shifts = self.loss_func is None and self._returns_loss is False and is_sequence
        return F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX) if shifts else labels


@dataclass(slots=True)
class ComputeLossObjective(Objective):
    """The loss from a `compute_loss` that a trainer subclass overrides.

    `num_items_in_batch` is the number of targets in the micro-batch: whether `compute_loss` divides a sum by it or
    returns a mean, the result is a mean over these targets, which is weighted here.
    """

    compute_loss: Callable[..., Any]
    _counter: ModelObjective = field(init=False)

    def __post_init__(self) -> None:
        self._counter = ModelObjective(self.compute_loss)  # counts labels only: it is never called for the loss

    def count(self, model: nn.Module, batch: Batch) -> Tensor:
        """Targets as the model declares them, without running it."""
        return self._counter.count(model, batch)

    def __call__(self, model: nn.Module, batch: Batch, num_items: Tensor, *, with_logits: bool = False) -> LossOutput:
        """The loss from `compute_loss`, weighted by the targets of the batch."""
        count = self.count(model, batch)
        inputs = shallow_copy(avoid_empty_targets(batch, count))  # a copy, since overrides may pop keys from the batch
        if not with_logits:
            mean = self.compute_loss(model, inputs, num_items_in_batch=count.clamp(min=1))
            return LossOutput(weighted_mean(scalar_loss(mean, "compute_loss"), count, num_items))
        result = self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=count.clamp(min=1))
        if not isinstance(result, tuple) or len(result) != 2:
            raise DataError(
                f"expected (loss, outputs) from compute_loss(..., return_outputs=True), got {type(result).__name__}"
            )
        return LossOutput(weighted_mean(scalar_loss(result[0], "compute_loss"), count, num_items), result[1])


@dataclass(slots=True)
class FunctionObjective(Objective):
    """The loss from a function that returns the sum over the targets of a batch, their number, and metrics.

    The number of targets is known only after the forward pass, too late to divide the loss of a micro-batch by that of
    the step. So `TrainStep` accumulates the gradients of sums, and divides them before it clips them. Elsewhere
    (evaluation), `count` calls the function and keeps its result for `__call__`.
    """

    columns: ClassVar = None
    function: ObjectiveFunction
    _last: tuple[Any, LossOutput] | None = field(init=False, default=None)
    """The last counted batch and its sums."""

    def count(self, model: nn.Module, batch: Batch) -> Tensor:
        """The number of targets that the function returns."""
        output = self._call(model, batch)
        self._last = batch, output
        assert output.num_targets is not None
        return output.num_targets

    def __call__(self, model: nn.Module, batch: Batch, num_items: Tensor, *, with_logits: bool = False) -> LossOutput:
        """The function's sums, divided by `num_items`, without model outputs."""
        del with_logits
        is_counted = self._last is not None and self._last[0] is batch
        output = self._last[1] if self._last is not None and is_counted else self._call(model, batch)
        self._last = None
        assert output.loss is not None
        metrics = {name: value / num_items for name, value in output.metrics.items()}
        return LossOutput(output.loss / num_items, None, metrics, output.num_targets)

    def _call(self, model: nn.Module, batch: Batch) -> LossOutput:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        result = self.function(model, shallow_copy(batch))
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise DataError(
                f"expected (loss_sum, count) or (loss_sum, count, metrics) from the objective {name}, got "
                f"{f'{len(result)} values' if isinstance(result, tuple) else type(result).__name__}"
            )
        loss, count, metrics = (*result, {})[:3]
        loss = scalar_loss(loss, f"the objective {name}")
        for value in (count, *metrics.values()):
            if torch.as_tensor(value).numel() != 1:
                raise DataError(f"expected count and metrics from the objective {name} as scalars, got {value!r}")
        return LossOutput(
            loss,
            None,
            {key: torch.as_tensor(value, device=loss.device).detach().reshape(()) for key, value in metrics.items()},
            torch.as_tensor(count, device=loss.device).detach().reshape(()),
        )


def as_objective(objective: Any) -> Objective | None:
    """An objective from a function; raises ConfigError for anything else but an objective or None."""
    if objective is None or isinstance(objective, Objective):
        return objective
    if isinstance(objective, type) or not callable(objective):
        got = f"the class {objective.__name__}" if isinstance(objective, type) else type(objective).__name__
        raise ConfigError(f"expected an Objective or a function (model, batch) as objective, got {got}")
    return FunctionObjective(objective)


def weighted_mean(mean: Tensor, count: Tensor, num_items: Tensor) -> Tensor:
    """Rescale a mean over `count` targets to its contribution to a mean over `num_items`."""
    return mean * (count / num_items)


def avoid_empty_targets(batch: Any, count: Tensor) -> Any:
    """The batch, with label 0 everywhere if `count`, its number of targets, is 0; for losses that are means.

    A mean over zero targets is 0/0, and masking its value does not help, since its gradients are NaN too. With these
    labels the mean is finite, and `weighted_mean` multiplies it by 0. Unlike an `if`, `torch.where` does not make the
    host wait for the device.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else batch[1]
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return batch
    labels = torch.where(count > 0, labels, 0)
    return {**batch, "labels": labels} if isinstance(batch, Mapping) else (batch[0], labels)


def scalar_loss(loss: Any, method: str) -> Tensor:
    """The loss reshaped to (); raises DataError if `method` returned anything but a scalar tensor."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise DataError(f"expected a scalar loss tensor from {method}, got {got}")


def shallow_copy(batch: Any) -> Any:
    """A shallow copy, since overrides may pop keys from the batch."""
    return dict(batch) if isinstance(batch, Mapping) else batch


# Model outputs


def logits_from_outputs(outputs: Any) -> Tensor:
    """Logits of model outputs: a tensor itself, `.logits`, `["logits"]`, or the second item of a pair."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = output_field(outputs, "logits")
    if logits is None and isinstance(outputs, tuple) and len(outputs) == 2:
        logits = outputs[1]
    if isinstance(logits, Tensor):
        return logits
    raise DataError(
        f"expected logits in the model outputs (a tensor, a pair (loss, logits) or .logits), got "
        f"{type(outputs).__name__}"
    )


def loss_from_outputs(outputs: Any) -> Tensor:
    """Loss of model outputs: `.loss`, `["loss"]`, or the first item of a tuple. Raises for a tensor (logits)."""
    loss = None
    if not isinstance(outputs, Tensor):
        loss = output_field(outputs, "loss")
        if loss is None and isinstance(outputs, tuple) and outputs:
            loss = outputs[0]
    if isinstance(loss, Tensor):
        return loss
    raise DataError(
        f"expected a loss in the model outputs (a tuple (loss, ...) or .loss), got {type(outputs).__name__}"
    )


def loss_and_logits_from_outputs(outputs: Any) -> tuple[Tensor, Tensor]:
    """Loss and logits, from a pair `(loss, logits)` or from `.loss` and `.logits`."""
    has_fields = output_field(outputs, "loss") is not None and output_field(outputs, "logits") is not None
    if has_fields or (isinstance(outputs, tuple) and len(outputs) == 2):
        return loss_from_outputs(outputs), logits_from_outputs(outputs)
    raise DataError(
        f"expected loss and logits in the model outputs (a pair, or .loss and .logits), got {type(outputs).__name__}"
    )


def output_field(outputs: Any, name: str) -> Any:
    """An attribute of the outputs or, in a mapping, the value of a key; None if there is neither."""
    value = getattr(outputs, name, None)
    return outputs.get(name) if value is None and isinstance(outputs, Mapping) else value


def _has_loss(outputs: Any) -> bool:
    if isinstance(outputs, Tensor):
        return False
    if output_field(outputs, "loss") is not None:
        return True
    return (
        not hasattr(outputs, "loss")
        and isinstance(outputs, tuple)
        and len(outputs) > 0
        and isinstance(outputs[0], Tensor)
    )


def _missing_loss(model: nn.Module) -> DataError:
    return DataError(
        f"expected a loss from {type(model).__name__} for a batch without labels, got none: add labels to the batch, "
        "return a loss from the model, or pass compute_loss_func"
    )


# Labels


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The fp32 sum over targets that are not -100."""
    if targets.is_floating_point():
        raise DataError(
            f"expected integer class ids as labels of a model that returns only logits, got {targets.dtype}: return a "
            "loss from the model, or pass compute_loss_func"
        )
    if logits.shape[:-1] != targets.shape:
        raise DataError(
            f"expected labels of shape {list(logits.shape[:-1])} for logits of shape {list(logits.shape)}, got "
            f"{list(targets.shape)}"
        )
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def _shifts_labels(model: nn.Module) -> bool | None:
    """Whether a model declares that its loss predicts the next token; None if it declares nothing.

    transformers derives `loss_type` from the name of the class. Names like `GPT2LMHeadModel` give None, and
    `ForConditionalGeneration` covers encoder-decoders, which do not shift, and vision-language models, which do.
    """
    loss_type = getattr(model, "loss_type", None)
    if loss_type in (None, "ForConditionalGeneration"):
        can_generate = getattr(model, "can_generate", None)
        is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", None)
        if can_generate is not None and is_encoder_decoder is not None and can_generate():
            return not is_encoder_decoder
    return None if loss_type is None else loss_type == "ForCausalLM"


def _count_targets(targets: Tensor | None, batch: Batch, model: nn.Module) -> Tensor:
    if targets is None:  # samples: the length of the first tensor
        values = batch.values() if isinstance(batch, Mapping) else batch
        sizes = (len(value) for value in values if isinstance(value, Tensor) and value.ndim)
        return torch.full((), next(sizes, 1), device=next(model.parameters()).device)
    if targets.is_floating_point():
        return torch.full((), targets.shape[0], device=targets.device)
    return (targets != IGNORE_INDEX).sum()


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    parts = f" of {len(batch)} parts" if isinstance(batch, tuple | list) else ""
    raise DataError(
        f"expected a batch as a dict or a pair (x, y), got a {type(batch).__name__}{parts}: pass a data_collator"
    )
