"""How runs end: stops and aborts, steps that are not finite, and what is put back afterwards."""

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
from whimbrel.train.callbacks import ControlCallback

Make = Callable[..., Any]


def test_an_abort_saves_and_logs_nothing(args: Make, fit: Make, data: Make) -> None:
    class Abort(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["control"].should_abort_without_save = event["state"].global_step == 3

    settings = args(save_strategy="steps", save_steps=2, logging_steps=3, eval_strategy="steps", eval_steps=3)
    trainer, _ = fit(settings, callbacks=[Abort()], eval_dataset=data(4))
    assert trainer.state.global_step == 3
    assert trainer.state.log_history == []
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [2]
    assert trainer.stopped_by == ("Abort", "on_step_end", "abort")


def test_a_stop_ends_with_log_evaluation_and_save(args: Make, fit: Make, data: Make) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            event["control"].should_training_stop = event["state"].global_step == 3

    settings = args(save_strategy="steps", save_steps=100, eval_strategy="steps", eval_steps=100)
    trainer, _ = fit(settings, callbacks=[Stop()], eval_dataset=data(4))
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [3]
    assert {"loss", "eval_loss"} <= {key for line in trainer.state.log_history for key in line}


def test_callbacks_can_call_off_what_is_due(args: Make, fit: Make) -> None:
    class CallOff(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            if event["state"].global_step == 4:
                event["control"].should_save = False

    settings = args(save_strategy="steps", save_steps=2)
    fit(settings, callbacks=[CallOff()])
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [2, 6, 8]


def poisoned(*bad: int) -> Callable[..., Tensor]:
    """A loss that is NaN at the given calls."""
    calls = 0

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        value = nn.functional.cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch
        return value * float("nan") if calls in bad else value

    return loss


def test_nonfinite_stop_names_the_step_and_saves_nothing(args: Make, fit: Make) -> None:
    settings = args(save_strategy="steps", save_steps=2)
    with pytest.raises(TrainingError, match="step 4 has the loss nan and the gradient norm nan: lower"):
        fit(settings, compute_loss_func=poisoned(4))
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [2]


def test_nonfinite_skip_leaves_the_weights_alone(args: Make, fit: Make) -> None:
    weights: dict[int, Tensor] = {}

    class Keep(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            weights[event["state"].global_step] = event["model"].layers[0].weight.detach().clone()

    trainer, losses = fit(args(on_nonfinite="skip"), compute_loss_func=poisoned(4), callbacks=[Keep()])
    assert trainer.state.global_step == 8
    assert torch.equal(weights[3], weights[4])
    assert not torch.equal(weights[4], weights[5])
    assert [str(value) for value in losses.values].count("nan") == 1
    assert torch.tensor([line["loss"] for line in trainer.state.log_history if "loss" in line]).isfinite().all()


def test_nonfinite_rollback_goes_back_and_on_with_other_data(args: Make, fit: Make) -> None:
    went: list[int] = []

    class Rewound(TrainerCallback):
        def on_rewind(self, **event: Any) -> None:
            went.append(event["step"])

    settings = args(on_nonfinite="rollback", save_strategy="steps", save_steps=3)
    trainer, losses = fit(settings, compute_loss_func=poisoned(5), callbacks=[Rewound()])
    assert went == [3]
    assert trainer.state.global_step == 8
    assert torch.tensor(losses.values).isfinite().all()
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [3, 6, 8]
    with pytest.raises(TrainingError, match="after going back 3 times"):
        fit(args(on_nonfinite="rollback", save_strategy="steps", save_steps=3, output_dir=settings.output_dir + "2"),
            compute_loss_func=poisoned(*range(5, 99)))  # fmt: skip
    with pytest.raises(TrainingError, match="no checkpoint to go back to"):
        fit(args(on_nonfinite="rollback", output_dir=settings.output_dir + "3"), compute_loss_func=poisoned(2))


def test_fp16_overflow_is_a_skip_and_the_scale_is_saved(args: Make, fit: Make) -> None:
    settings = args(mixed_precision="fp16", save_strategy="steps", save_steps=8)
    trainer, losses = fit(settings)
    scaler = trainer.precision.scaler
    assert scaler is not None
    assert torch.tensor(losses.values).isfinite().all()
    scaler._scale = torch.tensor(4.0)
    assert trainer.state_dict()["grad_scaler"]["scale"] == 4.0
    again, _ = fit(args(mixed_precision="fp16", max_steps=9), resume=True)
    assert again.state.global_step == 9


def test_torch_switches_are_put_back(args: Make, fit: Make) -> None:
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            seen.append((torch.get_float32_matmul_precision(), torch.is_anomaly_enabled()))

    fit(args(float32_matmul_precision="medium", detect_anomaly=True, max_steps=1), callbacks=[Look()])
    assert seen == [("medium", True)]
    assert (torch.get_float32_matmul_precision(), torch.is_anomaly_enabled()) == ("highest", False)


def test_two_jobs_do_not_share_a_directory(args: Make, fit: Make) -> None:
    class Second(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            with pytest.raises(ConfigError, match="directory of a run that is running: name another output_dir"):
                fit(args(overwrite_output_dir=True))

    settings = args(max_steps=1, save_strategy="steps", save_steps=1)
    fit(settings, callbacks=[ControlCallback(), Second()])
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [1]
