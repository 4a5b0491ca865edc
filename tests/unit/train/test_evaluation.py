"""Evaluation losses weighted by targets, and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from whimbrel.models import GPT, GPTConfig
from whimbrel.train import BaseTrainer, TrainerCallback

Make = Callable[..., Any]


def mean(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels)


def share(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch


class Steps(TrainerCallback):
    """Counts the batches that were evaluated."""

    count = 0

    def on_prediction_step(self, **event: Any) -> None:
        self.count += 1


@pytest.mark.parametrize("compute", [mean, share, None])
def test_a_custom_loss_is_weighted_by_targets(args: Make, net: Make, data: Make, compute: Any) -> None:
    """Masked labels, a short last batch, and a batch without targets."""
    rows = data(10)
    for place in (0, 4, 5, 6, 7):
        rows[place]["labels"] = -100
    model = net()
    trainer = BaseTrainer(args(per_device_eval_batch_size=4), model, eval_dataset=rows, compute_loss_func=compute)
    with torch.no_grad():
        logits = model(torch.stack([row["x"] for row in rows]))
    expected = float(F.cross_entropy(logits, torch.tensor([row["labels"] for row in rows])))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-6)
    assert trainer.predict(rows).metrics["test_loss"] == pytest.approx(expected, abs=1e-6)


def test_predict_reads_all_data_once(args: Make, net: Make, data: Make) -> None:
    class Once:
        reads = 0

        def __iter__(self) -> Iterator[Any]:
            self.reads += 1
            return iter(data(10))

    once, steps = Once(), Steps()
    trainer = BaseTrainer(args(per_device_eval_batch_size=4, max_eval_steps=1), net(), callbacks=[steps])
    found = trainer.predict(once)
    assert (once.reads, steps.count) == (1, 3)
    assert found.predictions.shape == (10, 3)
    assert found.label_ids is not None
    assert found.metrics["test_loss"] == pytest.approx(float(F.cross_entropy(found.predictions, found.label_ids)))


def test_predictions_without_labels_have_no_loss(args: Make, net: Make, data: Make) -> None:
    found = BaseTrainer(args(), net()).predict([{"x": row["x"]} for row in data(5)])
    assert found.predictions.shape == (5, 3)
    assert found.label_ids is None
    assert found.metrics == {}


def test_predict_returns_the_loss_of_a_gpt(args: Make) -> None:
    """GPT computes its loss without logits, so the trainer requests them."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, context_length=8, num_layers=1, embd_size=16, num_heads=2))
    ids = torch.randint(0, 32, (6, 9))
    found = BaseTrainer(args(), model).predict([(row[:-1], row[1:]) for row in ids])
    assert found.label_ids is not None
    assert torch.equal(found.label_ids, ids[:, 1:])
    logits = found.predictions[..., :32].flatten(0, 1)
    assert found.metrics["test_loss"] == pytest.approx(float(F.cross_entropy(logits, ids[:, 1:].flatten())), abs=1e-5)
