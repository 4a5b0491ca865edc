"""Distillation: train a model on the most probable tokens of a teacher with the same vocabulary.

The teacher runs once over the dataset (`precompute_teacher`) and is not in memory during training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.distributed import World, unwrap
from whimbrel.models import IGNORE_INDEX
from whimbrel.ops import distillation_loss_reference, linear_distillation_loss, linear_top_k, top_k_log_probs
from whimbrel.train.batches import collate
from whimbrel.train.objectives import Batch, LossOutput, Objective, logits_from_outputs
from whimbrel.train.preference import model_inputs
from whimbrel.train.target_values import TargetValuesDataset, compute_target_values

__all__ = ["Distillation", "precompute_teacher"]


@dataclass(slots=True)
class Distillation(Objective):
    """KL divergence from a teacher's top-k distribution, averaged over targets: see `linear_distillation_loss`.

    Batches have `teacher_ids` and `teacher_log_probs` of shape (*targets, k). Only the positions of `targets` matter,
    not their values.
    """

    count_name = "supervised_tokens"
    columns: ClassVar = ("targets", "documents", "position_ids", "teacher_ids", "teacher_log_probs")
    temperature: float = 1.0
    """The temperature of the teacher's log-probabilities, and of the model."""

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)

    def count(self, model: nn.Module, batch: Batch) -> Tensor:
        """The number of targets."""
        del model
        return (_values(batch)[0] != IGNORE_INDEX).sum()

    def __call__(self, model: nn.Module, batch: Batch, num_items: Tensor, *, with_logits: bool = False) -> LossOutput:
        """The divergence, divided by `num_items`; a GPT computes logits only with `with_logits`."""
        targets, ids, log_probs = _values(batch)
        inputs, is_gpt = model_inputs(model, batch)
        ids, log_probs = ids.flatten(0, -2), log_probs.flatten(0, -2)
        if is_gpt:
            config: Any = unwrap(model).config
            loss_fn = partial(
                linear_distillation_loss,
                teacher_ids_NK=ids,
                teacher_log_probs_NK=log_probs,
                vocab_size=config.vocab_size,
                softcap=config.logit_softcap,
                temperature=self.temperature,
            )
            outputs = model(**inputs, loss_fn=loss_fn, return_logits=with_logits)
            losses = outputs.loss
            outputs = outputs._replace(loss=None)
        else:
            outputs = model(**inputs)
            logits = logits_from_outputs(outputs).flatten(0, -2)
            losses = distillation_loss_reference(logits, ids, log_probs, temperature=self.temperature)
        is_target = targets.flatten() != IGNORE_INDEX
        return LossOutput(torch.where(is_target, losses, 0.0).sum() / num_items, outputs)


def precompute_teacher(
    model: nn.Module,
    dataset: Any,
    path: str | Path,
    *,
    k: int = 64,
    temperature: float = 1.0,
    batch_size: int = 8,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    data_collator: Callable[[list[Any]], Any] = collate,
    world: World | None = None,
) -> TargetValuesDataset:
    """`dataset` with ids and log-probabilities of the teacher's k most probable tokens for each target.

    They take 8 k bytes per target in the directory `path`; values that already exist there are reused. Other arguments
    are those of `compute_target_values`.
    """
    _check_temperature(temperature)

    def compute(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        ids, log_probs = _top_k(model, batch, k, temperature)
        shape = (*batch["targets"].shape, k)
        return {"teacher_ids": ids.view(shape), "teacher_log_probs": log_probs.view(shape)}

    settings = {"kind": "teacher", "k": k, "temperature": temperature}
    return compute_target_values(
        model, dataset, path, compute, settings,
        batch_size=batch_size, autocast=autocast, data_collator=data_collator, world=world,
    )  # fmt: skip


def _top_k(model: nn.Module, batch: Mapping[str, Any], k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of the teacher, (batch * tokens, k)."""
    inputs, is_gpt = model_inputs(model, batch)
    if not is_gpt:
        return top_k_log_probs(logits_from_outputs(model(**inputs)).flatten(0, -2), k, temperature=temperature)
    config: Any = unwrap(model).config
    top: list[tuple[Tensor, Tensor]] = []

    def loss_fn(hidden: Tensor, weight: Tensor) -> Tensor:
        top.append(
            linear_top_k(
                hidden, weight, k, vocab_size=config.vocab_size, softcap=config.logit_softcap, temperature=temperature
            )
        )
        return top[0][1]

    model(**inputs, loss_fn=loss_fn)
    return top[0]


def _values(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, and the teacher's ids and log-probabilities."""
    names = ("targets", "teacher_ids", "teacher_log_probs")
    missing = [name for name in names if not isinstance(batch, Mapping) or name not in batch]
    if missing or not isinstance(batch, Mapping):
        raise DataError(f"expected {missing[0]} in the batch, got none: compute the teacher with precompute_teacher")
    targets, ids, log_probs = (batch[name] for name in names)
    if ids.shape != log_probs.shape or ids.shape[:-1] != targets.shape:
        raise DataError(
            f"expected teacher_ids and teacher_log_probs of shape {[*targets.shape, 'k']}, got {list(ids.shape)} and "
            f"{list(log_probs.shape)}"
        )
    return targets, ids, log_probs


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < math.inf:
        raise ConfigError(f"expected a positive temperature, got {temperature}")
