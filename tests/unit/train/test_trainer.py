"""The trainer: its arguments, the arithmetic of its loop, and its events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainingArguments as TheirArguments

from whimbrel.base.errors import ConfigError
from whimbrel.optim import GaLoreWarm
from whimbrel.train import BaseTrainer, RunConfig, Trainer, TrainerCallback
from whimbrel.train.callback import EVENTS
from whimbrel.train.callbacks import ProgressCallback

Make = Callable[..., Any]
MakeRun = Callable[..., RunConfig]


def test_trains_any_module_on_a_list_of_dicts(args: Make, fit: Make, data: Make) -> None:
    trainer, losses = fit(args(max_steps=40), eval_dataset=data(8))
    assert losses.values[-1] < 0.5 * losses.values[0]
    output = trainer.evaluate()
    assert output["eval_loss"] < 1.0
    assert trainer.state.global_step == 40
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == list(range(2, 41, 2))
    assert trainer.state.epoch == pytest.approx(40 / 6)


def test_train_returns_steps_loss_and_metrics(args: Make, net: Make, data: Make) -> None:
    trainer = BaseTrainer(args(logging_steps=1), net(), train_dataset=data(), callbacks=[])
    output = trainer.train()
    assert output.global_step == 8
    losses = [line["loss"] for line in trainer.state.log_history]
    assert output.training_loss == pytest.approx(sum(losses) / 8)
    assert output.metrics["num_input_tokens_seen"] == 32
    assert output.metrics["total_flos"] == 6 * sum(p.numel() for p in net().parameters()) * 32


@pytest.mark.parametrize("sizes", [(12, 1), (4, 3), (2, 6), (5, 3)])
def test_accumulation_equals_one_big_batch(
    args: Make, fit: Make, data: Make, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    """Also with ignored labels, and with a short last micro-batch."""
    batch, accumulation = sizes
    rows = data(12)
    for row in rows[::3]:
        row["labels"] = -100
    whole, _ = fit(
        args(per_device_train_batch_size=12, max_steps=3, max_grad_norm=0, output_dir=str(tmp_path / "a")),
        train_dataset=rows,
    )
    parts, _ = fit(
        args(
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=3, max_grad_norm=0,
            output_dir=str(tmp_path / "b"),
        ),
        train_dataset=rows,
    )  # fmt: skip
    for a, b in zip(whole.unwrapped_model().parameters(), parts.unwrapped_model().parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_leftover_micro_batches_of_an_epoch_make_a_step(args: Make, fit: Make, data: Make) -> None:
    trainer, losses = fit(
        args(max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=4, logging_strategy="no"),
        train_dataset=data(24),
    )
    assert len(losses.values) == trainer.state.global_step == trainer.state.max_steps == 4  # 6 batches: 4 and 2
    assert trainer.state.epoch == trainer.state.raw_epoch == 2
    assert trainer.state.epoch_start_step == 4


def test_the_epoch_fraction_is_correct_with_accumulation(args: Make, fit: Make, data: Make) -> None:
    seen: list[float] = []

    class Epochs(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            seen.append(event["state"].epoch)

    fit(args(max_steps=5, gradient_accumulation_steps=4), train_dataset=data(24), callbacks=[Epochs])
    assert seen == pytest.approx([4 / 6, 1.0, 1 + 4 / 6, 2.0, 2 + 4 / 6])


def test_max_steps_overrides_epochs_and_should_epoch_stop_ends_one(args: Make, fit: Make) -> None:
    trainer, _ = fit(args(max_steps=3, num_train_epochs=100))
    assert trainer.state.global_step == 3

    class EndEpoch(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["control"].should_epoch_stop = event["state"].global_step == 2

    trainer, _ = fit(args(max_steps=5, output_dir=str(Path(args().output_dir or "") / "b")), callbacks=[EndEpoch()])
    assert (trainer.state.raw_epoch, trainer.state.epoch_start_step) == (1, 2)
    assert trainer.state.epoch == pytest.approx(1.5)


def test_evaluation_is_weighted_by_targets(args: Make, net: Make, data: Make) -> None:
    rows = data(10)
    rows[0]["labels"] = rows[7]["labels"] = -100
    losses = [
        BaseTrainer(args(per_device_eval_batch_size=size), net(), eval_dataset=rows).evaluate()["eval_loss"]
        for size in (1, 3, 10)
    ]
    assert losses[1:] == pytest.approx(losses[:1] * 2, abs=1e-6)
    capped = BaseTrainer(args(per_device_eval_batch_size=3, max_eval_steps=1), net(), eval_dataset=rows)
    assert capped.evaluate()["eval_loss"] != pytest.approx(losses[0], abs=1e-6)


def test_evaluate_after_train_scores_the_trained_weights(args: Make, net: Make, data: Make) -> None:
    made = []

    def init() -> nn.Module:
        made.append(net())
        return made[-1]

    trainer = BaseTrainer(args(max_steps=30), model_init=init, train_dataset=data(), eval_dataset=data())
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * before
    assert len(made) == 1
    assert trainer.predict(data()).metrics["test_loss"] == pytest.approx(trainer.evaluate()["eval_loss"])


def test_predict_returns_logits_and_labels_in_order(args: Make, net: Make, data: Make) -> None:
    model, rows = net(), data(6)
    found = BaseTrainer(args(per_device_eval_batch_size=4), model).predict(rows)
    assert torch.allclose(found.predictions, model(torch.stack([row["x"] for row in rows])))
    assert found.label_ids is not None
    assert found.label_ids.tolist() == [row["labels"] for row in rows]


def test_every_event_is_dispatched_with_its_keywords(args: Make, fit: Make, data: Make) -> None:
    heard: dict[str, set[str]] = {}

    class All:
        def __getattr__(self, name: str) -> Any:
            if name in EVENTS:
                return lambda **event: heard.update({name: set(event)})
            raise AttributeError(name)

    trainer, _ = fit(
        args(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=4, gradient_accumulation_steps=2),
        callbacks=[All()], eval_dataset=data(4),
    )  # fmt: skip
    trainer.predict(data(4))
    shared = {
        "args", "state", "control", "model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader",
        "eval_dataloader", "trainer",
    }  # fmt: skip
    assert set(heard) == set(EVENTS) - {"on_rollback", "on_sample"}
    assert all(shared <= keywords for keywords in heard.values())
    assert "logs" in heard["on_log"] & heard["on_log_step"]
    assert "metrics" in heard["on_evaluate"] & heard["on_train_metrics"] & heard["on_predict"]


def test_logs_may_be_changed_before_they_are_logged(args: Make, fit: Make) -> None:
    class Adds(TrainerCallback):
        def on_log_step(self, **event: Any) -> None:
            event["logs"]["extra"] = 7

    trainer, _ = fit(args(max_steps=2), callbacks=[Adds()])
    assert trainer.state.log_history[0]["extra"] == 7
    assert trainer.log({"own": 1}) is trainer.control
    assert trainer.state.log_history[-1] == {"own": 1, "epoch": trainer.state.epoch, "step": 2}


def test_optimizer_and_scheduler_by_name_or_object(args: Make, fit: Make, net: Make) -> None:
    model = net()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(own, 4, 0.5)
    trainer, _ = fit(args(), model, optimizers=(own, schedule))
    assert trainer.optimizer is own
    assert own.param_groups[0]["lr"] == pytest.approx(0.025)
    named, _ = fit(args(output_dir=args().output_dir + "b"), optimizers=("muon", "linear"))
    assert type(named.optimizer).__name__ == "Muon"
    assert not named.optimizer.skip_nonfinite  # the training loop checks instead
    model = net()
    careful = GaLoreWarm(model.parameters(), rank=2)
    fit(args(output_dir=args().output_dir + "d"), model, optimizers=(careful, None))
    assert careful.skip_nonfinite  # an optimizer object keeps its setting
    made, _ = fit(args(output_dir=args().output_dir + "c"), optimizers=(lambda ps: torch.optim.SGD(ps, lr=0.1), None))
    assert isinstance(made.optimizer, torch.optim.SGD)


def test_the_optimizer_can_step_in_backward(args: Make, fit: Make, tmp_path: Path) -> None:
    plain, _ = fit(args(max_grad_norm=0.0))
    inside, _ = fit(args(max_grad_norm=0.0, optimizer_in_backward=True, output_dir=str(tmp_path / "b")))
    for a, b in zip(plain.unwrapped_model().parameters(), inside.unwrapped_model().parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ConfigError, match="optimizer_in_backward"):
        fit(args(max_grad_norm=1.0, optimizer_in_backward=True, output_dir=str(tmp_path / "c")))


def test_wrong_constructor_arguments_raise(args: Make, net: Make) -> None:
    with pytest.raises(ConfigError, match=r"Trainer\(args, model\)"):
        BaseTrainer(net(), args())
    with pytest.raises(ConfigError, match=r"expected .* got transformers\.TrainingArguments"):
        BaseTrainer(TheirArguments(output_dir="unused", report_to=[]), net())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a torch.nn.Module .* got str"):
        BaseTrainer(args(), "gpt2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a model, got none yet"):
        BaseTrainer(args(), model_init=net).save_checkpoint()
    with pytest.raises(ConfigError, match="needs a model"):
        BaseTrainer(args())
    with pytest.raises(ConfigError, match=r"train\(\) needs train_dataset"):
        BaseTrainer(args(), net()).train()
    with pytest.raises(ConfigError, match=r"evaluate\(\) needs eval_dataset"):
        BaseTrainer(args(), net()).evaluate()
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        args(gradient_accumulation_steps=0)


def test_base_trainer_has_no_default_callbacks(args: Make, net: Make) -> None:
    assert BaseTrainer.default_callbacks() == []
    names = [type(callback).__name__ for callback in Trainer(args(), net()).callbacks]
    assert names == [type(callback).__name__ for callback in Trainer.default_callbacks()] != []
    assert len(Trainer(args(), net(), callbacks=[]).callbacks) == len(names)


def test_evaluating_another_dataset_does_not_replace_eval_dataset(args: Make, net: Make, data: Make) -> None:
    trainer = BaseTrainer(args(), net(), eval_dataset=data(4))
    own = trainer.evaluate()["eval_loss"]
    other = trainer.evaluate(data(12))["eval_loss"]
    trainer.predict(data(12))
    assert trainer.evaluate()["eval_loss"] == own != other
    assert trainer.state.best_metric is None  # only a training run updates the best metric


def test_on_epoch_end_is_dispatched_when_a_run_ends_within_an_epoch(args: Make, fit: Make) -> None:
    events = []

    class Passes(TrainerCallback):
        def on_epoch_begin(self, **event: Any) -> None:
            events.append("begin")

        def on_epoch_end(self, **event: Any) -> None:
            events.append("end")

    fit(args(max_steps=8), callbacks=[Passes()])
    assert events == ["begin", "end"] * 2


def test_train_can_be_called_twice(args: Make, fit: Make) -> None:
    plain, first = fit(args(max_grad_norm=0.0))
    plain.train()
    inside, second = fit(args(max_grad_norm=0.0, optimizer_in_backward=True, output_dir=args().output_dir + "b"))
    inside.train()
    assert first.hex == second.hex
    assert len(first.hex) == 16


def test_default_dtype_applies_only_to_model_init(args: Make, net: Make, fit: Make) -> None:
    with pytest.raises(ConfigError, match="default_dtype = float64 .* model_init"):
        BaseTrainer(args(default_dtype="float64"), net())

    def look(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        assert outputs.dtype == torch.float64
        return nn.functional.cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch

    rows = [{"x": torch.randn(4, dtype=torch.float64), "labels": i % 3} for i in range(8)]
    trainer = BaseTrainer(
        args(default_dtype="float64"), model_init=net, train_dataset=rows, compute_loss_func=look, callbacks=[]
    )
    assert trainer.train().global_step == 8
    assert torch.get_default_dtype() == torch.float32


def test_a_scheduler_of_another_optimizer_raises(args: Make, fit: Make, net: Make) -> None:
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="belongs to a different optimizer"):
        fit(args(), optimizers=(None, torch.optim.lr_scheduler.StepLR(other, 2)))


def test_reduce_lr_on_plateau_raises(args: Make, fit: Make, net: Make) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau is not supported"):
        fit(args(), model, optimizers=(optimizer, plateau))


def test_compiling_a_torch_nn_class_raises(args: Make, fit: Make) -> None:
    with pytest.raises(ConfigError, match="torch.compile skips .* got Sequential"):
        fit(
            args(torch_compile=True, compile_scope="model", torch_compile_backend="eager"),
            nn.Sequential(nn.Linear(4, 3)),
        )


def test_tensors_and_numpy_values_can_be_logged_and_saved(args: Make, fit: Make) -> None:
    class Odd(TrainerCallback):
        def on_log_step(self, **event: Any) -> None:
            event["logs"] |= {"tensor": torch.tensor(1.5), "path": Path("a"), "many": torch.arange(2), "text": "b"}

    trainer, _ = fit(args(save_strategy="steps", save_steps=8), callbacks=[Odd()])
    assert trainer.state.log_history[0]["tensor"] == 1.5
    again, _ = fit(args(max_steps=9), resume=True)
    assert again.state.log_history[:4] == trainer.state.log_history[:4]


@pytest.mark.parametrize("kind", [Trainer, "from_config"])
def test_callbacks_are_added_to_the_defaults(
    kind: type[Trainer], args: Make, net: Make, data: Make, make_run: MakeRun
) -> None:
    own = TrainerCallback()
    if kind == "from_config":
        trainer: Trainer = Trainer.from_config(make_run(), callbacks=[own])
    else:
        trainer = Trainer(args(), net(), train_dataset=data(), callbacks=[own])
    assert [type(callback) for callback in trainer.callbacks][:2] == [type(c) for c in Trainer.default_callbacks()]
    assert own in trainer.callbacks


def test_a_callback_replaces_the_default_of_its_class(args: Make, net: Make, data: Make) -> None:
    own = ProgressCallback(plain=True)
    trainer = Trainer(args(), net(), train_dataset=data(), callbacks=[own])
    assert [callback for callback in trainer.callbacks if isinstance(callback, ProgressCallback)] == [own]
    trainer.remove_callback(ProgressCallback)
    assert not any(isinstance(callback, ProgressCallback) for callback in trainer.callbacks)
