"""How runs end: stops, aborts, non-finite steps, and restored torch settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError, TrainingError
from whimbrel.checkpoint import list_checkpoints
from whimbrel.train import TrainerCallback

Make = Callable[..., Any]


def test_abort_neither_saves_nor_logs(args: Make, fit: Make, data: Make) -> None:
    class Abort(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["control"].should_abort_without_save = event["state"].global_step == 3

    settings = args(save_strategy="steps", save_steps=2, logging_steps=3, eval_strategy="steps", eval_steps=3)
    trainer, _ = fit(settings, callbacks=[Abort()], eval_dataset=data(4))
    assert trainer.state.global_step == 3
    assert trainer.state.log_history == []
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [2]
    assert trainer.stopped_by == ("Abort", "on_step_end", "abort")


def test_stop_logs_evaluates_and_saves(args: Make, fit: Make, data: Make) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["control"].should_training_stop = event["state"].global_step == 3

    settings = args(save_strategy="steps", save_steps=100, eval_strategy="steps", eval_steps=100)
    trainer, _ = fit(settings, callbacks=[Stop()], eval_dataset=data(4))
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [3]
    assert {"loss", "eval_loss"} <= {key for line in trainer.state.log_history for key in line}


def test_callbacks_can_cancel_due_actions(args: Make, fit: Make) -> None:
    class CancelSave(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            if event["state"].global_step == 4:
                event["control"].should_save = False

    settings = args(save_strategy="steps", save_steps=2)
    fit(settings, callbacks=[CancelSave()])
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [2, 6, 8]


def nan_loss_at(*bad: int) -> Callable[..., Tensor]:
    """A loss function that returns NaN at these calls."""
    calls = 0

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        value = nn.functional.cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch
        return value * float("nan") if calls in bad else value

    return loss


def test_nonfinite_stop_names_the_step_and_saves_nothing(args: Make, fit: Make) -> None:
    settings = args(save_strategy="steps", save_steps=2)
    with pytest.raises(TrainingError, match="step 4: loss nan, gradient norm nan: lower"):
        fit(settings, compute_loss_func=nan_loss_at(4))
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [2]


def test_nonfinite_skip_keeps_the_weights(args: Make, fit: Make) -> None:
    weights: dict[int, Tensor] = {}

    class Keep(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            weights[event["state"].global_step] = event["model"].layers[0].weight.detach().clone()

    trainer, losses = fit(args(on_nonfinite="skip"), compute_loss_func=nan_loss_at(4), callbacks=[Keep()])
    assert trainer.state.global_step == 8
    assert torch.equal(weights[3], weights[4])
    assert not torch.equal(weights[4], weights[5])
    assert [str(value) for value in losses.values].count("nan") == 1
    assert torch.tensor([line["loss"] for line in trainer.state.log_history if "loss" in line]).isfinite().all()


def test_nonfinite_rollback_restores_a_checkpoint_and_continues_with_new_data(args: Make, fit: Make) -> None:
    rolled_back_to: list[int] = []

    class Rewound(TrainerCallback):
        def on_rollback(self, **event: Any) -> None:
            rolled_back_to.append(event["step"])

    settings = args(on_nonfinite="rollback", save_strategy="steps", save_steps=3)
    trainer, losses = fit(settings, compute_loss_func=nan_loss_at(5), callbacks=[Rewound()])
    assert rolled_back_to == [3]
    assert trainer.state.global_step == 8
    assert torch.tensor(losses.values).isfinite().all()
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [3, 6, 8]
    with pytest.raises(TrainingError, match="after 3 rollbacks"):
        fit(args(on_nonfinite="rollback", save_strategy="steps", save_steps=3, output_dir=settings.output_dir + "2"),
            compute_loss_func=nan_loss_at(*range(5, 99)))  # fmt: skip
    with pytest.raises(TrainingError, match="no checkpoint to roll back to"):
        fit(args(on_nonfinite="rollback", output_dir=settings.output_dir + "3"), compute_loss_func=nan_loss_at(2))


def test_fp16_overflow_is_a_skip_and_the_scale_is_saved(args: Make, fit: Make) -> None:
    """The initial scale makes the first gradients overflow: these steps are skipped, and the schedule waits."""
    stepped: list[int] = []

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.metrics: list[dict[str, Any]] = []

        def on_train_begin(self, **event: Any) -> None:
            event["trainer"].precision.scaler._init_scale = 2.0**40

        def on_optimizer_step(self, **event: Any) -> None:
            stepped.append(event["state"].global_step)

        def on_train_metrics(self, **event: Any) -> None:
            self.metrics.append(event["metrics"])

    watch = Watch()
    settings = {"mixed_precision": "fp16", "save_strategy": "steps", "save_steps": 30, "lr_scheduler_type": "linear"}
    trainer, _ = fit(args(**settings, max_steps=30), callbacks=[watch])
    skipped = [metrics["step"] - 1 for metrics in watch.metrics if metrics["skipped"]]
    assert 10 < len(skipped) < 28
    assert stepped == [step for step in range(30) if step not in skipped]
    assert {metrics["lr"] for metrics in watch.metrics[: len(skipped)]} == {watch.metrics[0]["lr"]}
    assert trainer.precision.scaler is not None
    scale = trainer.precision.scaler.get_scale()
    assert scale < 2.0**30
    again, _ = fit(args(**settings, max_steps=31), resume=True)
    assert again.precision.scaler is not None
    assert again.precision.scaler.get_scale() == scale


def test_a_run_that_skips_every_step_fails(args: Make, fit: Make) -> None:
    with pytest.raises(TrainingError, match="100 skipped steps"):
        fit(args(on_nonfinite="skip", max_steps=200), compute_loss_func=nan_loss_at(*range(5, 300)))


def test_torch_settings_are_restored(args: Make, fit: Make) -> None:
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            seen.append((torch.get_float32_matmul_precision(), torch.is_anomaly_enabled()))

    fit(args(float32_matmul_precision="medium", detect_anomaly=True, max_steps=1), callbacks=[Look()])
    assert seen == [("medium", True)]
    assert (torch.get_float32_matmul_precision(), torch.is_anomaly_enabled()) == ("highest", False)


@pytest.mark.parametrize("event", ["on_step_end", "on_train_metrics", "on_log_step", "on_log", "on_evaluate"])
def test_an_abort_from_any_event_saves_nothing(args: Make, fit: Make, data: Make, event: str) -> None:
    class Abort:
        def __init__(self) -> None:
            setattr(self, event, self.ask)

        def ask(self, **keywords: Any) -> None:
            keywords["control"].should_abort_without_save = keywords["state"].global_step == 3

    settings = args(save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, logging_steps=1)
    trainer, _ = fit(settings, callbacks=[Abort()], eval_dataset=data(4))
    assert trainer.state.global_step == 3
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [1, 2]


def test_a_callback_cannot_withdraw_the_stop_of_another(args: Make, fit: Make) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            if event["state"].global_step == 3:
                event["control"].should_training_stop = True

    class ClearsStop(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["control"].should_training_stop = False

        def on_train_metrics(self, **event: Any) -> None:
            event["control"].should_training_stop = False

    trainer, _ = fit(args(), callbacks=[Stop(), ClearsStop()])
    assert trainer.state.global_step == 3


def test_save_checkpoint_from_a_callback_waits_for_the_metrics(args: Make, fit: Make) -> None:
    class Save(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["trainer"].save_checkpoint()

    settings = args()
    with pytest.raises(TrainingError, match="step 3: loss nan"):
        fit(settings, compute_loss_func=nan_loss_at(3), callbacks=[Save()])
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [1, 2]


def test_on_train_end_reaches_all_callbacks_when_one_fails(args: Make, fit: Make) -> None:
    outputs = []

    class Fails(TrainerCallback):
        def on_train_end(self, **event: Any) -> None:
            raise ValueError("on_train_end failed")

    class RecordsOutput(TrainerCallback):
        def on_train_end(self, **event: Any) -> None:
            outputs.append(event["output"])

    with pytest.raises(ValueError, match="on_train_end failed"):
        fit(args(), callbacks=[Fails(), RecordsOutput()])
    assert len(outputs) == 1


def test_evaluations_without_eval_data_raise(args: Make, fit: Make) -> None:
    for settings in ({"eval_strategy": "steps"}, {"preserve_best_model": True}, {"eval_on_save": True}):
        with pytest.raises(ConfigError, match="pass eval_dataset"):
            fit(args(**settings))


def test_a_rollback_without_new_checkpoints_loads_the_resumed_one(args: Make, fit: Make) -> None:
    rolled_back_to: list[int] = []

    class Rewound(TrainerCallback):
        def on_rollback(self, **event: Any) -> None:
            rolled_back_to.append(event["step"])

    settings = {"save_strategy": "steps", "save_steps": 2, "on_nonfinite": "rollback"}
    fit(args(**settings, max_steps=12))
    first = str(Path(args().output_dir) / "checkpoints" / "step-00000004")
    trainer, _ = fit(
        args(**settings, max_steps=9), resume=first, compute_loss_func=nan_loss_at(4), callbacks=[Rewound()]
    )
    assert rolled_back_to == [6]
    assert trainer.state.global_step == 9


def test_a_rollback_at_the_end_of_an_epoch_continues_with_the_next(args: Make, fit: Make) -> None:
    """The checkpoint is of the previous step, so the current epoch has no batch left."""

    class FlushMetrics(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["trainer"].flush_metrics()

    settings = args(on_nonfinite="rollback", save_strategy="steps", save_steps=6, max_steps=14)
    trainer, _ = fit(settings, compute_loss_func=nan_loss_at(12), callbacks=[FlushMetrics()])
    assert trainer.state.global_step == 14


def test_an_epoch_can_be_stopped_when_it_begins(args: Make, fit: Make) -> None:
    class EndAtOnce(TrainerCallback):
        def on_epoch_begin(self, **event: Any) -> None:
            event["control"].should_epoch_stop = True

    trainer, _ = fit(args(max_steps=3), callbacks=[EndAtOnce()])
    assert trainer.state.raw_epoch == 3  # epochs of one step each
