"""Preference objectives: DPO with its variants, and ORPO.

Both learn from pairs, a chosen and a rejected completion of one prompt. A pair is never split over micro-batches. A
batch is a mapping in one of two layouts:

- packed: `input_ids`, `targets` and `documents` of shape (rows, tokens). Documents are numbered from 0 in each row.
  Documents 2p and 2p + 1 are the chosen and the rejected sample of the row's pair p. Padding has no targets; it may
  have any number below the length of the row, or -1.
- unpacked: (pairs, 2, tokens), with the chosen sample first, and optionally `attention_mask` of the same shape.

Targets are already shifted, and -100 for tokens that are not part of a completion. Other keys, such as `position_ids`,
are passed to the model.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.distributed import unwrap
from whimbrel.models import IGNORE_INDEX
from whimbrel.models.layers import eval_mode
from whimbrel.ops import linear_log_probs
from whimbrel.train.objectives import Batch, LossOutput, Objective, logits_from_outputs

__all__ = ["DPO", "ORPO", "REFERENCE_COLUMN", "PreferenceObjective", "model_inputs", "token_log_probs"]

REFERENCE_COLUMN = "reference_log_probs"
"""The reference model's log-probability of each target, in the shape of the targets: see `precompute_reference`."""
NOT_INPUTS = frozenset({"targets", REFERENCE_COLUMN, "teacher_ids", "teacher_log_probs"})
"""Keys of a batch that are for the objective, not for the model."""
Reference = nn.Module | Callable[[], AbstractContextManager[Any]]
"""A frozen model, or a function that returns a context in which the trained model is the reference (adapters off)."""


class Pairs(NamedTuple):
    """Completions of a micro-batch; the last dimension is (chosen, rejected)."""

    log_probs: Tensor
    """Sum over the tokens of each completion."""
    lengths: Tensor
    """Number of targets of each completion."""

    @property
    def exist(self) -> Tensor:
        """Whether there is a pair; a pair without targets in one of its completions does not count."""
        return (self.lengths > 0).all(-1)


class PreferenceObjective(Objective):
    """Base class: the loss is a mean over pairs, as are the metrics."""

    count_name = "pairs"
    columns: ClassVar = ("targets", "documents", "position_ids", REFERENCE_COLUMN)

    def count(self, model: nn.Module, batch: Batch) -> Tensor:
        """The number of pairs."""
        del model
        return _pairs(batch, None).exist.sum()

    def __call__(self, model: nn.Module, batch: Batch, num_items: Tensor, *, with_logits: bool = False) -> LossOutput:
        """The loss; the outputs are the summed log-probabilities of the completions, (..., 2), instead of logits."""
        del with_logits
        reference = self.reference_log_probs(model, batch)
        pairs = _pairs(batch, token_log_probs(model, batch))
        losses, metrics = self.pair_losses(pairs, None if reference is None else _pairs(batch, reference))
        exist = pairs.exist

        def mean(value: Tensor) -> Tensor:
            return torch.where(exist, value, 0.0).sum() / num_items

        return LossOutput(
            mean(losses),
            {"log_probs": pairs.log_probs.detach()},
            {name: mean(value.detach()) for name, value in metrics.items()},
        )

    def reference_log_probs(self, model: nn.Module, batch: Batch) -> Tensor | None:
        """The reference's log-probability of each target; None without a reference."""
        del model, batch
        return None

    @abstractmethod
    def pair_losses(self, pairs: Pairs, reference: Pairs | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and the metrics of each pair. Values for pairs that do not exist are not used, but finite."""


@dataclass(slots=True)
class DPO(PreferenceObjective):
    """Direct preference optimization, as in TRL's `DPOTrainer`.

    The reference is in each batch (`precompute_reference`: no second model in memory), or is computed in each step.
    """

    beta: float = 0.1
    """How strongly the model is kept close to the reference; the inverse margin of IPO is 2 beta."""
    loss: Literal["sigmoid", "ipo", "robust"] = "sigmoid"
    """`sigmoid`: DPO, with label smoothing conservative DPO; `ipo`: IPO, with log-ratios per token; `robust`: the
    unbiased loss if the fraction `label_smoothing` of the labels is flipped."""
    label_smoothing: float = 0.0
    """Assumed probability that the labels of a pair are flipped."""
    reference: Reference | None = None
    """Where reference log-probabilities come from; default: the batch."""

    def __post_init__(self) -> None:
        if self.loss not in ("sigmoid", "ipo", "robust"):
            raise ConfigError(f"expected a DPO loss (sigmoid, ipo or robust), got {self.loss!r}")
        if not 0 < self.beta < math.inf:
            raise ConfigError(f"expected a positive beta, got {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"expected label_smoothing from 0 to below 0.5, got {self.label_smoothing}")
        if self.loss == "ipo" and self.label_smoothing:
            raise ConfigError("label_smoothing does not apply to the ipo loss: remove it, or use sigmoid or robust")
        if isinstance(self.reference, nn.Module):
            self.reference.eval().requires_grad_(requires_grad=False)

    def reference_log_probs(self, model: nn.Module, batch: Batch) -> Tensor:
        """From the batch, or else from the reference model."""
        targets = _targets(batch)
        assert isinstance(batch, Mapping)
        if REFERENCE_COLUMN in batch:
            values: Tensor = batch[REFERENCE_COLUMN]
            if values.shape != targets.shape:
                raise DataError(
                    f"expected {REFERENCE_COLUMN} of the shape of the targets, {list(targets.shape)}, got "
                    f"{list(values.shape)}"
                )
            return values
        if self.reference is None:
            raise DataError(
                f"expected {REFERENCE_COLUMN} in the batch, or DPO(reference=...), got neither: compute them with "
                "precompute_reference, or pass a frozen model or a function that disables adapters"
            )
        if not isinstance(self.reference, nn.Module):
            with eval_mode(model), self.reference():
                return token_log_probs(model, batch)
        if next(self.reference.parameters()).device != targets.device:
            self.reference.to(targets.device)
        with torch.no_grad():
            return token_log_probs(self.reference, batch)

    def pair_losses(self, pairs: Pairs, reference: Pairs | None) -> tuple[Tensor, dict[str, Tensor]]:
        assert reference is not None
        ratios = pairs.log_probs - reference.log_probs
        if self.loss == "ipo":
            chosen, rejected = (ratios / pairs.lengths.clamp(min=1)).unbind(-1)
            losses = (chosen - rejected - 1 / (2 * self.beta)).square()
        else:
            margins = self.beta * (ratios[..., 0] - ratios[..., 1])
            kept, flipped = -F.logsigmoid(margins), -F.logsigmoid(-margins)
            smoothing = self.label_smoothing
            if self.loss == "sigmoid":
                losses = (1 - smoothing) * kept + smoothing * flipped
            else:
                losses = ((1 - smoothing) * kept - smoothing * flipped) / (1 - 2 * smoothing)
        return losses, reward_metrics(self.beta * ratios, pairs.log_probs)


@dataclass(slots=True)
class ORPO(PreferenceObjective):
    """Odds-ratio preference optimization: the loss of the chosen completion plus an odds-ratio loss; no reference.

    Both use mean log-probabilities per token. Prompts have no loss, as in the paper; TRL's `ORPOTrainer` also trains
    on the prompt of the chosen sample.
    """

    beta: float = 0.1
    """Weight of the odds-ratio loss (lambda in the paper)."""

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ConfigError(f"expected a positive beta, got {self.beta}")

    def pair_losses(self, pairs: Pairs, reference: Pairs | None) -> tuple[Tensor, dict[str, Tensor]]:
        del reference
        means = pairs.log_probs / pairs.lengths.clamp(min=1)
        # The odds of probability 1 are infinite.
        means = torch.where(pairs.exist[..., None], means, -1.0).clamp(max=-1e-6)
        log_odds = means - torch.log(-torch.expm1(means))
        log_odds_ratio = log_odds[..., 0] - log_odds[..., 1]
        ratio_loss = -F.logsigmoid(log_odds_ratio)
        nll = -means[..., 0]
        metrics = reward_metrics(self.beta * means, means)
        metrics |= {"nll_loss": nll, "log_odds_ratio": -ratio_loss, "log_odds_chosen": log_odds_ratio}
        return nll + self.beta * ratio_loss, metrics


def reward_metrics(rewards: Tensor, log_probs: Tensor) -> dict[str, Tensor]:
    """The metrics of TRL, for each pair; the last dimension of both arguments is (chosen, rejected)."""
    (chosen, rejected), (chosen_log_probs, rejected_log_probs) = rewards.unbind(-1), log_probs.unbind(-1)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "logps/chosen": chosen_log_probs,
        "logps/rejected": rejected_log_probs,
    }


# Log-probabilities


def token_log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probability of each target in fp32, in the shape of `batch["targets"]`; 0 where targets are -100.

    A GPT computes them without materializing all logits; of any other model, the logits are used.
    """
    targets = _targets(batch)
    inputs, is_gpt = model_inputs(model, batch)
    if is_gpt:
        config: Any = unwrap(model).config
        loss_fn = partial(
            linear_log_probs,
            targets_N=targets.flatten(),
            vocab_size=config.vocab_size,
            softcap=config.logit_softcap,
            ignore_index=IGNORE_INDEX,
        )
        log_probs: Tensor = model(**inputs, loss_fn=loss_fn).loss
        return log_probs.view_as(targets)
    logits = logits_from_outputs(model(**inputs))
    losses = F.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return -losses.view_as(targets)


def model_inputs(model: nn.Module, batch: Batch) -> tuple[dict[str, Any], bool]:
    """The batch's inputs of the model, of shape (rows, tokens), and whether the model has GPT's `loss_fn` argument.

    Raises DataError for packed rows and a model that does not know `documents`: attention would cross samples.
    """
    targets = _targets(batch)
    assert isinstance(batch, Mapping)
    inputs = {
        name: value.flatten(0, -2) if isinstance(value, Tensor) and value.shape == targets.shape else value
        for name, value in batch.items()
        if name not in NOT_INPUTS
    }
    inner = unwrap(model)
    parameters = inspect.signature(inner.forward).parameters
    if "documents" in inputs and "documents" not in parameters:
        raise DataError(
            f"expected one sample per row for {type(inner).__name__}, got packed rows (documents): disable packing"
        )
    return inputs, "loss_fn" in parameters


def _targets(batch: Batch) -> Tensor:
    targets = batch.get("targets") if isinstance(batch, Mapping) else None
    if not isinstance(targets, Tensor):
        got = f"the keys {', '.join(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
        raise DataError(f"expected a batch with input_ids and targets, got {got}")
    return targets


def _pairs(batch: Batch, log_probs: Tensor | None) -> Pairs:
    """Sum log-probabilities (None: zeros) over the targets of each completion."""
    targets = _targets(batch)
    assert isinstance(batch, Mapping)
    is_target = targets != IGNORE_INDEX
    log_probs = torch.zeros_like(targets, dtype=torch.float32) if log_probs is None else log_probs
    if targets.dim() == 3 and targets.shape[1] == 2:
        return Pairs(log_probs.masked_fill(~is_target, 0.0).sum(-1), is_target.sum(-1))
    documents = batch.get("documents")
    if not isinstance(documents, Tensor) or documents.shape != targets.shape or targets.dim() != 2:
        got = "no documents" if documents is None else f"documents of shape {list(documents.shape)}"
        raise DataError(
            "expected targets of shape (pairs, 2, tokens), or (rows, tokens) and documents of the same shape, got "
            f"targets of shape {list(targets.shape)} and {got}"
        )
    num_rows, num_tokens = targets.shape
    if documents.device.type == "cpu" and int(documents.max()) >= num_tokens:
        raise DataError(f"expected documents numbered from 0 in each row, got document {int(documents.max())}")
    shape = num_rows, num_tokens + num_tokens % 2  # a bound that does not depend on data, which may be on a GPU
    index = documents.clamp(min=0).long()
    lengths = torch.zeros(shape, dtype=torch.long, device=targets.device).scatter_add(1, index, is_target.long())
    sums = _scatter_sum(log_probs.masked_fill(~is_target, 0.0), index, shape)
    return Pairs(sums.view(num_rows, -1, 2), lengths.view(num_rows, -1, 2))


def _scatter_sum(values: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
    """`scatter_add` along rows that adds in the same order every time, so that resumed runs are bit-identical.

    On a GPU `scatter_add` uses atomics, and `index_put` sorts; on a CPU it is `index_put` that uses atomics.
    """
    sums = values.new_zeros(shape)
    if not values.is_cuda:
        return sums.scatter_add(1, index, values)
    rows = torch.arange(shape[0], device=values.device)[:, None].expand_as(index)
    return sums.index_put((rows, index), values, accumulate=True)
