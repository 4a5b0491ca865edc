"""What models return, and that a step's loss is one mean over its targets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whimbrel.base.errors import DataError
from whimbrel.train import logits_from_outputs, loss_and_logits_from_outputs, loss_from_outputs
from whimbrel.train.outputs import Objective

LOSS, LOGITS = torch.tensor(1.5), torch.randn(2, 3)


@pytest.mark.parametrize("outputs", [LOGITS, (LOSS, LOGITS), SimpleNamespace(logits=LOGITS)])
def test_logits_are_found(outputs: Any) -> None:
    assert logits_from_outputs(outputs) is LOGITS


@pytest.mark.parametrize("outputs", [(LOSS,), (LOSS, LOGITS), (LOSS, LOGITS, 3), SimpleNamespace(loss=LOSS)])
def test_the_loss_is_found(outputs: Any) -> None:
    assert loss_from_outputs(outputs) is LOSS


@pytest.mark.parametrize("outputs", [(LOSS, LOGITS), SimpleNamespace(loss=LOSS, logits=LOGITS)])
def test_both_are_found(outputs: Any) -> None:
    assert loss_and_logits_from_outputs(outputs) == (LOSS, LOGITS)


@pytest.mark.parametrize(
    ("find", "outputs"),
    [
        (loss_from_outputs, LOSS),
        (loss_from_outputs, ("loss", LOGITS)),
        (loss_from_outputs, SimpleNamespace(logits=LOGITS)),
        (logits_from_outputs, SimpleNamespace(loss=LOSS)),
        (logits_from_outputs, (LOSS, LOGITS, 3)),
        (loss_and_logits_from_outputs, LOGITS),
        (loss_and_logits_from_outputs, SimpleNamespace(loss=LOSS)),
        (loss_and_logits_from_outputs, (LOSS, LOGITS, 3)),
    ],
)
def test_what_is_not_there_is_refused(find: Any, outputs: Any) -> None:
    with pytest.raises(DataError, match=r"has no|is not a loss and logits"):
        find(outputs)


class Tagger(nn.Module):
    """Logits for every position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


class Mean(Tagger):
    """Returns the mean of its own shifted loss, as models of transformers do."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.table(input_ids)
        if labels is None:
            return SimpleNamespace(loss=None, logits=logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (4, 6), generator=generator)
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[3] = -100  # nothing of this row counts
    return [{"input_ids": ids[i : i + 1], "labels": labels[i : i + 1]} for i in range(4)]


@pytest.mark.parametrize("kind", [Tagger, Mean])
@pytest.mark.parametrize("compute", [False, True])
def test_parts_add_up_to_one_big_batch(kind: type[Tagger], compute: bool) -> None:
    """With masked targets, and with a micro-batch in which none counts."""

    def own(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        logits = logits_from_outputs(outputs)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    torch.manual_seed(0)
    model = kind()
    objective = Objective(model, own if compute else None)
    small = batches()
    big = {key: torch.cat([batch[key] for batch in small]) for key in small[0]}
    expected = F.cross_entropy(model.table(big["input_ids"])[:, :-1].flatten(0, 1), big["labels"][:, 1:].flatten())
    expected.backward()
    gradient = model.table.weight.grad
    assert gradient is not None
    model.zero_grad()
    counts = [objective.count(batch) for batch in small]
    assert sum(map(int, counts)) == int(objective.count(big)) == 11
    total = torch.stack(counts).sum()
    loss = 0.0
    for batch, count in zip(small, counts, strict=True):
        part = objective.loss(batch, total, count)
        part.backward()
        loss += part.item()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    assert torch.allclose(model.table.weight.grad, gradient, atol=1e-7)  # type: ignore[arg-type]


def test_labels_of_a_class_are_not_shifted() -> None:
    model = nn.Linear(3, 5)

    class Classifier(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model(x)

    batch = {"x": torch.randn(4, 3), "labels": torch.tensor([0, 4, -100, 2])}
    wrapped = Classifier()
    wrapped.inner = model
    objective = Objective(wrapped)
    assert int(objective.count(batch)) == 3
    expected = F.cross_entropy(model(batch["x"]), batch["labels"])
    assert torch.allclose(objective.loss(batch, torch.tensor(3), torch.tensor(3)), expected)


def test_a_batch_that_does_not_fit_is_named() -> None:
    objective = Objective(Tagger())
    with pytest.raises(DataError, match="takes input_ids, and the batch has 'tokens'"):
        objective.loss({"tokens": torch.zeros(1, 2, dtype=torch.int64)}, torch.tensor(1), torch.tensor(1))
    with pytest.raises(DataError, match="returned no loss and the batch has no labels"):
        objective.loss({"input_ids": torch.zeros(1, 2, dtype=torch.int64)}, torch.tensor(1), torch.tensor(1))
