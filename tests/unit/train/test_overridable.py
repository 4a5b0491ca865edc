"""Subclasses that override methods of `transformers.Trainer`: each override is called by the loop, or rejected."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from whimbrel.base.errors import ConfigError, DataError, TrainingError
from whimbrel.train import BaseTrainer, TrainerCallback
from whimbrel.train.hf_compat import SUPPORTED_OVERRIDES, UNSUPPORTED_OVERRIDES

Make = Callable[..., Any]


def their_methods() -> list[str]:
    """The methods of the installed transformers.Trainer, and the attributes that act like methods."""
    try:
        from transformers import Trainer as TheirTrainer
    except ImportError:
        return sorted(SUPPORTED_OVERRIDES | UNSUPPORTED_OVERRIDES.keys())
    own = [name for name, value in vars(TheirTrainer).items() if callable(value) or isinstance(value, staticmethod)]
    return sorted({*own, "compute_metrics", "preprocess_logits_for_metrics"})


@pytest.mark.parametrize("name", their_methods())
def test_every_method_of_transformers_is_supported_or_rejected(name: str, args: Make, net: Make) -> None:
    assert (name in SUPPORTED_OVERRIDES) != (name in UNSUPPORTED_OVERRIDES), (
        f"decide whether overriding {name} is honored or refused"
    )
    if name in SUPPORTED_OVERRIDES:
        assert hasattr(BaseTrainer, name)
        return
    child = type("Child", (BaseTrainer,), {name: lambda self, *given, **named: None})
    with pytest.raises(ConfigError, match=f"Child.{name} would never be called: ") as refused:
        child(args(), net())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", sorted(SUPPORTED_OVERRIDES - {"__init__"}))
def test_supported_methods_have_the_signatures_of_transformers(name: str) -> None:
    theirs = pytest.importorskip("transformers").Trainer
    if not hasattr(theirs, name):
        return  # an attribute in ours
    ours = inspect.signature(getattr(BaseTrainer, name)).parameters
    wanted = [key for key in inspect.signature(getattr(theirs, name)).parameters if not key.startswith("_")]
    assert [key for key in wanted if key not in ours] == []
    assert [key for key in ours if key in wanted] == wanted  # in that order


def test_overrides_in_mixins_and_instance_attributes_are_found(args: Make, net: Make, data: Make) -> None:
    class Mixin:
        def _get_train_sampler(self) -> None: ...

    class Child(Mixin, BaseTrainer): ...

    with pytest.raises(ConfigError, match=r"_get_train_sampler would never be called: .*get_train_dataloader"):
        Child(args(), net())
    trainer = BaseTrainer(args(), net(), train_dataset=data())
    trainer.evaluation_loop = lambda *_: None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="evaluation_loop would never be called"):
        trainer.train()


def test_missing_method_error_names_the_alternative(args: Make, net: Make) -> None:
    trainer = BaseTrainer(args(), net())
    with pytest.raises(AttributeError, match="'push_to_hub': .*whimbrel push"):
        trainer.push_to_hub()
    assert not hasattr(trainer, "some_attribute")


class Halved(BaseTrainer):
    """Trains half the loss, so that a run shows whether the override is used."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs)
        loss = 0.5 * F.cross_entropy(logits, labels)
        return (loss, {"logits": logits}) if return_outputs else loss


@pytest.mark.parametrize("accumulation", [1, 3])
def test_compute_loss_is_used_in_training_and_evaluation(
    accumulation: int, args: Make, net: Make, data: Make, fit: Make
) -> None:
    settings = args(
        gradient_accumulation_steps=accumulation, per_device_train_batch_size=6 // accumulation * 2, max_grad_norm=0.0,
        max_steps=2, logging_steps=1,
    )  # fmt: skip
    plain, _ = fit(settings)
    trainer = Halved(settings, net(), train_dataset=data(), eval_dataset=data())
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.5 * plain.state.log_history[0]["loss"], rel=1e-6)
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(0.5 * plain.state.log_history[0]["grad_norm"])
    rows = data()
    logits = trainer.model(torch.stack([row["x"] for row in rows])).detach()
    expected = 0.5 * float(F.cross_entropy(logits, torch.tensor([row["labels"] for row in rows])))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    predicted = trainer.predict(rows)
    assert predicted.metrics["test_loss"] == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(predicted.predictions, logits)


class Ragged(nn.Module):
    """Scores each position by itself; some targets are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def ragged_rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(8):
        labels = torch.randint(0, 5, (6,), generator=generator)
        labels[: number % 6] = -100
        rows.append({"x": torch.randn(6, 1, generator=generator), "labels": labels})
    return rows


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_compute_loss_may_return_a_mean_or_divide_by_num_items(kind: str, args: Make) -> None:
    """Four micro-batches with unequal numbers of targets are the step over one large batch."""
    calls: list[int] = []

    class Own(BaseTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
            calls.append(1)
            logits = model(inputs["x"]).flatten(0, 1)
            targets = inputs["labels"].flatten()
            if kind == "mean":
                return F.cross_entropy(logits, targets)
            return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    def weights(batch: int) -> Tensor:
        torch.manual_seed(0)
        settings = args(
            per_device_train_batch_size=batch, gradient_accumulation_steps=8 // batch, max_steps=3, max_grad_norm=0.0
        )
        trainer = Own(settings, Ragged(), train_dataset=ragged_rows())
        trainer.train()
        return trainer.model.layer.weight.detach()

    assert torch.allclose(weights(8), weights(2), atol=1e-5)
    assert len(calls) == 3 * 1 + 3 * 4


def test_compute_loss_may_call_super(args: Make, net: Make, data: Make, fit: Make) -> None:
    seen: list[int] = []

    class Child(BaseTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
            seen.append(int(num_items_in_batch))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    settings = args(gradient_accumulation_steps=2)
    plain, _ = fit(settings)
    trainer = Child(settings, net(), train_dataset=data())
    trainer.train()
    assert seen == [4] * 16
    for a, b in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_compute_loss_must_return_a_scalar(args: Make, net: Make, data: Make) -> None:
    class Child(BaseTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return model(inputs["x"])

    with pytest.raises(DataError, match=r"compute_loss, got .*\[4, 3\]"):
        Child(args(), net(), train_dataset=data()).train()


@pytest.mark.parametrize("own", [True, False])
def test_training_step_runs_forward_and_backward(own: bool, args: Make, net: Make, data: Make, fit: Make) -> None:
    calls: list[Any] = []

    class Child(BaseTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            calls.append(num_items_in_batch)
            if not own:
                return super().training_step(model, inputs, num_items_in_batch)
            loss = F.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="sum") / num_items_in_batch
            self.accelerator.backward(loss)
            return loss.detach()

    settings = args(gradient_accumulation_steps=2, logging_steps=1)
    plain, _ = fit(settings)
    trainer = Child(settings, net(), train_dataset=data())
    trainer.train()
    assert [int(count) for count in calls] == [8] * 16
    expected = [line["loss"] for line in plain.state.log_history]
    assert [line["loss"] for line in trainer.state.log_history] == pytest.approx(expected, abs=1e-6)
    for a, b in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_training_step_that_bypasses_the_loss_scale_raises(args: Make, net: Make, data: Make) -> None:
    class Child(BaseTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = F.cross_entropy(model(inputs["x"]).float(), inputs["labels"])
            loss.backward()
            return loss.detach()

    trainer = Child(args(mixed_precision="fp16"), net(), train_dataset=data())
    if trainer.precision.scaler is None:
        pytest.skip("no loss scaling on this device")
    with pytest.raises(TrainingError, match=r"must call self.accelerator.backward\(loss\)"):
        trainer.train()


@pytest.mark.parametrize("returns", [True, False])
def test_create_optimizer_and_scheduler_are_used(returns: bool, args: Make, net: Make, data: Make) -> None:
    class Child(BaseTrainer):
        def create_optimizer(self) -> Any:
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
            return self.optimizer if returns else None

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            assert optimizer is self.optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_training_steps)
            return self.lr_scheduler if returns else None

    trainer = Child(args(max_steps=4, logging_steps=1), net(), train_dataset=data())
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert [line["learning_rate"] for line in trainer.state.log_history] == [0.25, 0.1875, 0.125, 0.0625]
    trainer.args.overwrite_output_dir = True
    trainer.train()  # created again
    assert trainer.state.global_step == 4
    with pytest.raises(ConfigError, match="create_optimizer is overridden"):
        Child(args(), net(), optimizers=("adamw", None))


def test_create_optimizer_and_scheduler_in_one(args: Make, net: Make, data: Make) -> None:
    class Child(BaseTrainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)

    trainer = Child(args(max_steps=2, logging_steps=1), net(), train_dataset=data())
    trainer.train()
    assert [line["learning_rate"] for line in trainer.state.log_history] == [0.5, 0.5]

    class Empty(BaseTrainer):
        def create_optimizer(self) -> None: ...

    with pytest.raises(ConfigError, match="create_optimizer .*got None"):
        Empty(args(), net(), train_dataset=data()).train()


def test_overridden_dataloaders_are_used(args: Make, net: Make, data: Make) -> None:
    class Child(BaseTrainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(data(6), batch_size=3)  # type: ignore[arg-type]

        def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
            return DataLoader(data(4), batch_size=2)  # type: ignore[arg-type]

        def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
            return DataLoader(test_dataset[:5], batch_size=2)

    seen: list[Any] = []

    class Watch(TrainerCallback):
        def on_train_metrics(self, **event: Any) -> None:
            seen.append(event["metrics"]["tokens"])

    trainer = Child(args(max_steps=-1, num_train_epochs=2, eval_strategy="epoch"), net(), callbacks=[Watch()])
    trainer.train()
    assert (trainer.state.global_step, seen) == (4, [3] * 4)
    expected = BaseTrainer(args(), trainer.model).evaluate(data(4))["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert trainer.predict(data(8)).predictions.shape == (5, 3)


def test_prediction_step_returns_loss_logits_and_labels(args: Make, net: Make, data: Make) -> None:
    class Child(BaseTrainer):
        def prediction_step(
            self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
        ) -> tuple[Any, Any, Any]:
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return loss * 2, None if logits is None else -logits, labels

    plain, child = BaseTrainer(args(), net()), Child(args(), net())
    assert child.evaluate(data(10))["eval_loss"] == pytest.approx(2 * plain.evaluate(data(10))["eval_loss"])
    assert torch.equal(child.predict(data(10)).predictions, -plain.predict(data(10)).predictions)


def test_overridden_log_evaluate_and_compute_metrics_are_called(args: Make, net: Make, data: Make) -> None:
    class Child(BaseTrainer):
        def log(self, logs: dict[str, Any], start_time: float | None = None) -> Any:
            return super().log({**logs, "extra": 1}, start_time)

        def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
            return {**super().evaluate(*given, **named), "eval_mine": 7.0}

        def compute_metrics(self, prediction: Any) -> dict[str, float]:
            return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    settings = args(eval_strategy="steps", eval_steps=4, best_model_metric="mine", preserve_best_model=True)
    trainer = Child(settings, net(), train_dataset=data(), eval_dataset=data(8))
    trainer.train()
    assert all(line["extra"] == 1 for line in trainer.state.log_history)
    assert trainer.state.best_metric == 7.0
    assert {"eval_loss", "eval_accuracy", "eval_mine"} == set(trainer.evaluate())


def test_overridden_call_model_init_creates_the_model(args: Make, net: Make, data: Make) -> None:
    class Child(BaseTrainer):
        def call_model_init(self, trial: Any = None) -> nn.Module:
            return net(0.25)

    trainer = Child(args(max_steps=1), model_init=net, train_dataset=data())
    trainer.train()
    assert trainer.model.layers[2].p == 0.25


def test_overridden_save_model_is_called_for_checkpoints(args: Make, net: Make, data: Make, tmp_path: Path) -> None:
    class Child(BaseTrainer):
        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            (Path(output_dir) / "mine.txt").write_text(str(self.state.global_step))

    trainer = Child(args(save_strategy="steps", save_steps=4), net(), train_dataset=data())
    trainer.train()
    for step in (4, 8):
        found = tmp_path / "run" / "checkpoints" / f"step-{step:08}" / "save_model" / "mine.txt"
        assert found.read_text() == str(step)
    again = Child(args(max_steps=9, save_strategy="no"), net(), train_dataset=data())
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 9
