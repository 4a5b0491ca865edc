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
    """Makes the loss of a micro-batch as its share of a step.

    A pair is `(idx, targets)`, targets already shifted. A mapping goes in as keywords. Where the model returns no loss
    and `labels` follow a sequence, the loss is made here, of the next token. A model with a loss of its own is believed
    to score each label that is not -100; one that shifts them says so by `loss_type = "ForCausalLM"`, as those of
    transformers do. `compute` replaces the model's own loss.
    """

    model: nn.Module
    compute: LossFunction | None = None
    extras: Callable[[Tensor], dict[str, Any]] = lambda _: {}
    _kind: str | None = field(init=False)
    _takes: frozenset[str] = field(init=False)
    _takes_all: bool = field(init=False)
    _makes_loss: bool | None = field(init=False)
    _takes_targets: bool = field(init=False)

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.model.forward).parameters
        self._kind = _loss_type(self.model)
        self._takes = frozenset(parameters)
        self._takes_targets = next(itertools.islice(parameters, 1, None), "") in ("targets", "target", "labels", "y")
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        takes_labels = self._takes_all or "labels" in parameters
        undecided = takes_labels and self._kind is None and self.compute is None
        self._makes_loss = None if undecided else not takes_labels

    def count(self, batch: Batch) -> Tensor:
        """How many targets count."""
        if self._makes_loss is None and isinstance(batch, Mapping) and "labels" in batch:
            self._makes_loss = not self._returns_loss(batch)
        targets = self._targets(batch)
        if targets is None:
            return torch.ones((), dtype=torch.int64, device=next(self.model.parameters()).device)
        if targets.is_floating_point():
            return torch.tensor(targets.shape[0], device=targets.device)
        return (targets != IGNORE_INDEX).sum()

    def loss(self, batch: Batch, total: Tensor, count: Tensor) -> Tensor:
        """The sum over this batch's `count` targets, divided by the `total` of the step."""
        return self._share(*self._forward(batch, total), total, count)

    def scored(self, batch: Batch, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The logits of a batch, and where it has labels these and their loss."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else _pair(batch)[1]
        wanted = {"return_logits": True} if "return_logits" in self._takes else {}
        outputs, scored, divided = self._forward(batch, total, **wanted)
        loss = None if labels is None else self._share(outputs, scored, divided, total, count)
        return logits_from_outputs(outputs), labels, loss

    def _forward(self, batch: Batch, total: Tensor, **wanted: bool) -> tuple[Any, Tensor | None, bool]:
        """The outputs, the labels for a loss made from them, and whether theirs is divided by the total already."""
        if not isinstance(batch, Mapping):
            x, y = _pair(batch)
            if self.compute is not None:
                return self.model(x, **self.extras(x)), y, False
            if "loss_divisor" in self._takes:
                return self.model(x, y, loss_divisor=total, **wanted, **self.extras(x)), y, True
            return self.model(x, y) if self._takes_targets else self.model(x), y, False
        labels = batch.get("labels")
        if self.compute is not None and labels is not None:
            batch = {key: value for key, value in batch.items() if key != "labels"}
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

    @torch.no_grad()
    def _returns_loss(self, batch: Mapping[str, Any]) -> bool:
        """Whether the model makes a loss of labels; asked once, with one pass that no random number is drawn for."""
        devices = {parameter.device.index for parameter in self.model.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(devices=sorted(devices)):
            return _has_loss(self.model(**self._accepted(batch)))

    def _targets(self, batch: Batch) -> Tensor | None:
        if not isinstance(batch, Mapping):
            return _pair(batch)[1]
        return self._scored(batch["labels"]) if "labels" in batch else batch.get("targets")

    def _scored(self, labels: Tensor | None) -> Tensor | None:
        """Labels that count: of a sequence all but the first, where the loss is that of the next token."""
        if labels is None:
            return None
        here = self._kind is None and self.compute is None and bool(self._makes_loss) and _is_sequence(labels)
        shifts = here or (self._kind == "ForCausalLM" and labels.ndim > 1)
        return F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX) if shifts else labels


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The fp32 sum over targets that are not -100."""
    if logits.shape[:-1] != targets.shape:
        raise DataError(f"logits of shape {list(logits.shape)} do not go with labels of shape {list(targets.shape)}")
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def _loss_type(model: nn.Module) -> str | None:
    """What a model says of its loss; None where it says nothing.

    transformers reads it off the class's name. Where that fails (`GPT2LMHeadModel`) it is None, and the `loss_function`
    that such a model may call is then the one of next tokens.
    """
    kind = getattr(model, "loss_type", None)
    if kind is None and hasattr(model, "loss_type"):
        base = getattr(model, "get_base_model", lambda: model)()  # under an adapter
        if "loss_function" in inspect.unwrap(type(base).forward).__code__.co_names:
            return "ForCausalLM"
    return kind


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
