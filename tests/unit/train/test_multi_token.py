"""Multi-token prediction: targets, loss, schedule, resume, and settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from whimbrel.base.errors import ConfigError
from whimbrel.models import GPT, GPTConfig
from whimbrel.models.layers import eval_mode
from whimbrel.train import RunConfig, Trainer, TrainerCallback, read_log
from whimbrel.train.multi_token import MultiTokenObjective, multi_token_targets
from whimbrel.train.objectives import ModelObjective

MakeRun = Callable[..., RunConfig]
SETTINGS = {"objective__mtp_weights": [0.5, 0.25], "objective__mtp_until": 0.8}


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=40, context_length=8, num_layers=1, embd_size=16, num_heads=2, logit_softcap=10.0))


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.randint(1, 40, (3, 9), generator=torch.Generator().manual_seed(0))
    stream[:, 3] = 0  # the start of a document
    targets = stream[:, 1:].clone()
    targets[2, 6] = -100
    return stream[:, :-1], targets


def document_ids(x: torch.Tensor) -> torch.Tensor:
    return (x == 0).cumsum(dim=-1)


def test_targets_end_with_their_document_and_sequence() -> None:
    x, targets = torch.tensor([[5, 6, 0, 7, 8]]), torch.tensor([[6, 0, 7, 8, 9]])
    found = multi_token_targets(targets, 3, document_ids(x))
    assert found.tolist() == [[[6, 0, -100], [0, -100, -100], [7, 8, 9], [8, 9, -100], [9, -100, -100]]]
    assert multi_token_targets(targets, 3, None)[0, 0].tolist() == [6, 0, 7]


def test_the_loss_is_the_weighted_sum_over_tokens_ahead() -> None:
    model, (x, targets) = make_model(), make_batch()
    objective = MultiTokenObjective(weights=(0.5, 0.25), documents=document_ids)
    count = objective.count(model, (x, targets))
    assert count == (targets != -100).sum()
    output = objective(model, (x, targets), count)
    logits = model(x).logits
    assert logits is not None
    losses = [
        F.cross_entropy(logits.flatten(0, 1), column.flatten(), ignore_index=-100, reduction="sum") / count
        for column in multi_token_targets(targets, 3, document_ids(x)).unbind(-1)
    ]
    expected = losses[0] + 0.5 * losses[1] + 0.25 * losses[2]
    assert output.loss is not None
    torch.testing.assert_close(output.loss, expected)
    assert output.logged is not None
    torch.testing.assert_close(output.logged, losses[0].detach())
    parameters = list(model.parameters())
    found = torch.autograd.grad(output.loss, parameters)
    torch.testing.assert_close(found, torch.autograd.grad(expected, parameters), atol=1e-6, rtol=1e-4)


def test_evaluation_and_the_end_of_the_run_use_the_next_token_only() -> None:
    model, batch, one = make_model(), make_batch(), torch.ones(())
    objective = MultiTokenObjective(weights=(0.5,), until=0.5)
    with eval_mode(model):
        expected = ModelObjective()(model, batch, one).loss
        assert torch.equal(objective(model, batch, one).loss, expected)  # type: ignore[arg-type]
    objective.start_step(0.5)
    output = objective(model, batch, one)
    assert torch.equal(output.loss, expected)  # type: ignore[arg-type]
    assert output.logged is None


@pytest.mark.parametrize(
    ("progress", "weights"),
    [(0.0, (0.5, 0.25)), (0.15, (0.5, 0.125)), (0.3, (0.5,)), (0.45, (0.25,)), (0.6, ()), (1.0, ())],
)
def test_the_last_weight_decreases_first(progress: float, weights: tuple[float, ...]) -> None:
    objective = MultiTokenObjective(weights=(0.5, 0.25), until=0.6)
    objective.start_step(0.7)  # a rollback may return to an earlier step
    objective.start_step(progress)
    assert objective._current == pytest.approx(weights)


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, **event: Any) -> None:
        event["control"].should_training_stop |= event["state"].global_step == self.step


def losses(directory: Path) -> list[str]:
    return [line["loss"].hex() for line in read_log(directory / "log.jsonl") if "loss" in line]


@pytest.mark.parametrize("documents", ["join", "mask"])
def test_a_resumed_run_is_bit_identical(make_run: MakeRun, tmp_path: Path, documents: str) -> None:
    """The log has the loss of the next token, which is the same in the first step with other weights."""
    settings = {**SETTINGS, "validation__every": 3, "checkpoint__every": 3, "data__documents": documents}
    for name, stop in (("uninterrupted", 6), ("resumed", 3), ("resumed", 6)):
        Trainer.from_config(make_run(output_dir=tmp_path / name, **settings), callbacks=[StopAfter(stop)]).train()
    expected = losses(tmp_path / "uninterrupted")
    assert losses(tmp_path / "resumed") == expected
    settings.pop("objective__mtp_weights"), settings.pop("objective__mtp_until")
    Trainer.from_config(make_run(output_dir=tmp_path / "plain", **settings)).train()
    plain = losses(tmp_path / "plain")
    assert float.fromhex(plain[0]) == pytest.approx(float.fromhex(expected[0]), rel=1e-6)
    assert plain[-1] != expected[-1]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.*instantiated:DeprecationWarning"
)
@pytest.mark.parametrize("scope", ["block", "model"])
def test_compiled_models_train_with_it(make_run: MakeRun, tmp_path: Path, scope: str) -> None:
    """With several micro-batches per step, and weights that change from step to step."""
    eager, compiled = tmp_path / "eager", tmp_path / "compiled"
    Trainer.from_config(make_run(output_dir=eager, **SETTINGS)).train()
    changes = {"train__compile": True, "train__compile_backend": "eager", "train__compile_scope": scope}
    Trainer.from_config(make_run(output_dir=compiled, **SETTINGS, **changes)).train()
    for found, expected in zip(losses(compiled), losses(eager), strict=True):
        assert float.fromhex(found) == pytest.approx(float.fromhex(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective__mtp_weights": [0.5, 0.0]}, "mtp_weights above 0, got 0.0"),
        ({"objective__mtp_weights": [0.5], "objective__mtp_until": 1.5}, "mtp_until above 0 and at most 1, got 1.5"),
        ({"objective__mtp_until": 0.5}, "mtp_until = 0.5 needs objective.mtp_weights"),
        ({**SETTINGS, "parallel__pp": 2}, "mtp_weights does not work with pipeline parallelism"),
    ],
)
def test_invalid_settings_are_rejected(make_run: MakeRun, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer.from_config(make_run(**changes))
