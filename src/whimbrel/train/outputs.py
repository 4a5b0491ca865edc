"""What models return, and how a batch becomes a loss: every part is a share of one mean over all targets of a step."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whimbrel.base.errors import DataError
from whimbrel.models import IGNORE_INDEX

__all__ = ["Objective", "logits_from_outputs", "loss_and_logits_from_outputs", "loss_from_outputs"]

LossFunction = Callable[..., Tensor]
"""`(outputs, labels, num_items_in_batch=N) -> loss`: its part of the mean over the N targets of a whole step."""
Batch = tuple[Tensor, Tensor] | Mapping[str, Any]


def logits_from_outputs(outputs: Any) -> Tensor:
    """The logits: the outputs themselves where they are a tensor, their `.logits`, or the second of a pair."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = _part(outputs, "logits")
    if logits is None and isinstance(outputs, tuple) and len(outputs) == 2:
        logits = outputs[1]
    if isinstance(logits, Tensor):
        return logits
    raise DataError(f"a {type(outputs).__name__} has no logits: a model returns a tensor, (loss, logits) or .logits")


def loss_from_outputs(outputs: Any) -> Tensor:
    """The loss: the outputs' `.loss`, or the first of a tuple. A tensor alone is logits, and refused."""
    loss = None
    if not isinstance(outputs, Tensor):
        loss = _part(outputs, "loss")
        if loss is None and isinstance(outputs, tuple) and outputs:
            loss = outputs[0]
    if isinstance(loss, Tensor):
        return loss
    raise DataError(f"a {type(outputs).__name__} has no loss: a model returns (loss, logits) or .loss")


def loss_and_logits_from_outputs(outputs: Any) -> tuple[Tensor, Tensor]:
    """Both, from a pair or from two attributes."""
    named = _part(outputs, "loss") is not None and _part(outputs, "logits") is not None
    if named or (isinstance(outputs, tuple) and len(outputs) == 2):
        return loss_from_outputs(outputs), logits_from_outputs(outputs)
    raise DataError(f"a {type(outputs).__name__} is not a loss and logits: return a pair, or .loss and .logits")


@dataclass(slots=True)
class Objective:
    """Computes the loss of a micro-batch as its share of a step.

    A pair is `(idx, targets)`, targets already shifted. A mapping is passed as keywords. `compute` replaces the model's
    own loss; a model that returns no loss gets token cross-entropy, shifted by one where `labels` are sequences.

    A step is weighted by targets, so the objective has to know which labels the model's own loss averages over: those
    that are not -100, all but the first of a sequence where the loss predicts the next token. A model declares that
    with `loss_type = "ForCausalLM"`; generative decoder-only models of transformers are recognized by `can_generate()`.
    A batch without labels is weighted by its samples.
    """

    model: nn.Module
    compute: LossFunction | None = None
    extras: Callable[[Tensor], dict[str, Any]] = lambda _: {}
    _shifts: bool | None = field(init=False)
    """Whether the model declares that it shifts labels; None if it does not say."""
    _takes: frozenset[str] = field(init=False)
    _takes_all: bool = field(init=False)
    _makes_loss: bool | None = field(init=False)
    """Whether the loss is computed here; None until the first batch with labels decides."""
    _takes_targets: bool = field(init=False)
    _first: tuple[Batch, Any] | None = field(init=False, default=None)
    """The batch that decided and its outputs, until `loss` uses them."""

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.model.forward).parameters
        self._shifts = _shifts_labels(self.model)
        self._takes = frozenset(parameters)
        self._takes_targets = next(itertools.islice(parameters, 1, None), "") in ("targets", "target", "labels", "y")
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        takes_labels = self._takes_all or "labels" in parameters
        undecided = takes_labels and self._shifts is None and self.compute is None
        self._makes_loss = None if undecided else not takes_labels

    @property
    def decided(self) -> bool:
        """Whether targets can be counted without running the model."""
        return self._makes_loss is not None

    def count(self, batch: Batch) -> Tensor:
        """Number of targets, or of samples where the batch has none. Call it under autocast.

        Which labels are targets may depend on whether the model returns a loss. The first batch with labels is then
        run through the model here, and `loss` reuses its outputs: no forward pass is repeated or wasted.
        """
        if self._makes_loss is None and isinstance(batch, Mapping) and "labels" in batch:
            # Evaluation may need logits later (`scored`); training never does.
            wanted = {} if torch.is_grad_enabled() else self._wants_logits()
            outputs = self.model(**self._accepted(batch), **wanted)
            self._makes_loss = not _has_loss(outputs)
            self._first = batch, outputs
        targets = self._targets(batch)
        if targets is None:
            return _sample_count(batch, next(self.model.parameters()).device)
        if targets.is_floating_point():
            return torch.full((), targets.shape[0], device=targets.device)
        return (targets != IGNORE_INDEX).sum()

    def loss(self, batch: Batch, total: Tensor, count: Tensor) -> Tensor:
        """The sum over this batch's `count` targets, divided by the `total` of the step."""
        return self._share(*self._forward(batch, total), total, count)

    def scored(
        self, batch: Batch, total: Tensor, count: Tensor, *, labeled: bool, logits: bool = True
    ) -> tuple[Any, Tensor | None]:
        """The model's outputs for a batch, and their loss where it is `labeled` or the outputs name one.

        `logits`: also return logits, which a model may omit to save memory.
        """
        outputs, scored, divided = self._forward(batch, total, **(self._wants_logits() if logits else {}))
        has_loss = labeled or _part(outputs, "loss") is not None
        return outputs, self._share(outputs, scored, divided, total, count) if has_loss else None

    def _forward(self, batch: Batch, total: Tensor, **wanted: bool) -> tuple[Any, Tensor | None, bool]:
        """The outputs, the labels for a loss made from them, and whether theirs is divided by the total already."""
        if not isinstance(batch, Mapping):
            x, y = _pair(batch)
            if self.compute is not None:
                return self.model(x, **self.extras(x)), y, False
            if {"targets", "num_items_in_batch"} <= self._takes:
                outputs = self.model(x, targets=y, num_items_in_batch=total, **wanted, **self.extras(x))
                return outputs, y, True
            return self.model(x, y) if self._takes_targets else self.model(x), y, False
        given, labels = batch, batch.get("labels")
        if self.compute is not None and labels is not None:
            batch = {key: value for key, value in batch.items() if key != "labels"}
        if self._first is not None and self._first[0] is given:
            outputs, self._first = self._first[1], None
        else:
            outputs = self.model(**self._accepted(batch), **wanted)
        return outputs, labels if self.compute is not None else self._scored(labels), False

    def _share(self, outputs: Any, labels: Tensor | None, divided: bool, total: Tensor, count: Tensor) -> Tensor:
        """The loss of outputs as a part of the step."""
        if self.compute is not None:
            return self.compute(outputs, labels, num_items_in_batch=total)
        if _has_loss(outputs):
            loss = loss_from_outputs(outputs)
            # A mean over no target is 0/0: `where` lets neither its value nor its gradient through.
            return loss if divided else torch.where(count > 0, loss, 0.0) * (count / total)
        if labels is None:
            raise DataError(
                f"{type(self.model).__name__} returned no loss and the batch has no labels: add them to the batch, "
                "return a loss, or give compute_loss_func"
            )
        return cross_entropy(logits_from_outputs(outputs), labels) / total

    def _accepted(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch as the model takes it: labels are left out where it has no place for them, nothing else is."""
        if self._takes_all:
            return batch
        if unknown := [key for key in batch if key not in self._takes and key != "labels"]:
            raise DataError(
                f"{type(self.model).__name__} takes {', '.join(sorted(self._takes))}, and the batch has "
                f"'{unknown[0]}': rename the column, drop it, or give a data_collator"
            )
        return {key: value for key, value in batch.items() if key in self._takes}

    def _wants_logits(self) -> dict[str, bool]:
        return {"return_logits": True} if "return_logits" in self._takes else {}

    def _targets(self, batch: Batch) -> Tensor | None:
        if not isinstance(batch, Mapping):
            return _pair(batch)[1]
        return self._scored(batch["labels"]) if "labels" in batch else batch.get("targets")

    def _scored(self, labels: Tensor | None) -> Tensor | None:
        """Labels that count: of a sequence all but the first, where the loss is that of the next token."""
        if labels is None:
            return None
        here = self._shifts is None and self.compute is None and bool(self._makes_loss) and _is_sequence(labels)
        shifts = here or (bool(self._shifts) and labels.ndim > 1)
        return F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX) if shifts else labels


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The fp32 sum over targets that are not -100."""
    if targets.is_floating_point():
        raise DataError(
            f"expected integer class ids as labels of a model that returns logits alone, got {targets.dtype}: return a "
            "loss from the model, or give compute_loss_func"
        )
    if logits.shape[:-1] != targets.shape:
        raise DataError(f"logits of shape {list(logits.shape)} do not go with labels of shape {list(targets.shape)}")
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def _shifts_labels(model: nn.Module) -> bool | None:
    """Whether a model declares that its loss predicts the next token; None where it declares nothing.

    transformers derives `loss_type` from the name of the class. Names like `GPT2LMHeadModel` give None, and
    `ForConditionalGeneration` names encoder-decoders, which do not shift, as well as decoders with images, which do.
    """
    kind = getattr(model, "loss_type", None)
    if kind in (None, "ForConditionalGeneration"):
        generates = getattr(model, "can_generate", None)
        encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", None)
        if generates is not None and encoder is not None and generates():
            return not encoder
    return None if kind is None else kind == "ForCausalLM"


def _sample_count(batch: Batch, device: torch.device) -> Tensor:
    """Samples of a batch without labels: the length of its first tensor."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    sizes = (len(value) for value in values if isinstance(value, Tensor) and value.ndim)
    return torch.full((), next(sizes, 1), device=device)


def _is_sequence(labels: Tensor) -> bool:
    return labels.ndim == 2 and labels.shape[1] > 1 and not labels.is_floating_point()


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    parts = f" of {len(batch)} parts" if isinstance(batch, tuple | list) else ""
    raise DataError(f"a batch is a {type(batch).__name__}{parts}: give dicts or pairs (x, y), or a data_collator")


def _has_loss(outputs: Any) -> bool:
    if isinstance(outputs, Tensor):
        return False
    if _part(outputs, "loss") is not None:
        return True
    return (
        not hasattr(outputs, "loss")
        and isinstance(outputs, tuple)
        and len(outputs) > 0
        and isinstance(outputs[0], Tensor)
    )


def _part(outputs: Any, name: str) -> Any:
    """What outputs hold under a name, as an attribute or as a key."""
    found = getattr(outputs, name, None)
    return outputs.get(name) if found is None and isinstance(outputs, Mapping) else found
