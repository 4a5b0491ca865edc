"""Optimizer and scheduler objects on resume: which settings apply, and which objects raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, StepLR

from whimbrel.base.errors import CheckpointError
from whimbrel.train import BaseTrainer

Make = Callable[..., Any]


@pytest.fixture
def run(args: Make, fit: Make, net: Make) -> Make:
    """Train to a step with the optimizer and scheduler that `make(parameters)` returns, resuming."""

    def train(steps: int, make: Callable[[Any], tuple[Any, Any]], **changes: Any) -> BaseTrainer:
        model = net()
        settings = args(max_steps=steps, save_strategy="steps", save_steps=1, **changes)
        return fit(settings, model, optimizers=make(model.parameters()), resume=True)[0]

    return train


def test_changed_settings_of_an_optimizer_object_apply_on_resume(run: Make) -> None:
    """Moments are restored, too."""
    first = run(2, lambda ps: (AdamW(ps, lr=0.05, weight_decay=0.1, betas=(0.8, 0.9)), None))
    again = run(3, lambda ps: (AdamW(ps, lr=0.01, weight_decay=0.3, betas=(0.8, 0.9)), None))
    (group,) = again.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.01, 0.3, (0.8, 0.9))
    assert {int(state["step"]) for state in first.optimizer.state.values()} == {2}
    assert {int(state["step"]) for state in again.optimizer.state.values()} == {3}


def test_counters_in_groups_are_restored(run: Make) -> None:
    """Schedule-free optimizers store counters in their parameter groups."""

    class Counting(SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr)
            for group in self.param_groups:
                group["k"] = 0

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["k"] += 1
            return super().step(closure)

    run(2, lambda ps: (Counting(ps, lr=0.1), None))
    for steps, lr in ((3, 0.1), (5, 0.2)):
        (group,) = run(steps, lambda ps, lr=lr: (Counting(ps, lr=lr), None)).optimizer.param_groups
        assert (group["k"], group["lr"]) == (steps, lr)


def test_a_scheduler_object_keeps_the_settings_of_the_checkpoint(
    run: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def pair(lr: float, last: int) -> Callable[[Any], tuple[Optimizer, Any]]:
        def make(params: Any) -> tuple[Optimizer, Any]:
            optimizer = SGD(params, lr=lr, momentum=0.9)
            return optimizer, CosineAnnealingLR(optimizer, last)

        return make

    uninterrupted = run(6, pair(0.1, 8), output_dir=str(tmp_path / "uninterrupted"))
    run(3, pair(0.1, 8), output_dir=str(tmp_path / "interrupted"))
    caplog.clear()
    same = run(4, pair(0.1, 8), output_dir=str(tmp_path / "interrupted"))
    assert "of the scheduler passed in" not in caplog.text
    assert same.lr_scheduler.last_epoch == 4
    again = run(6, pair(0.5, 20), output_dir=str(tmp_path / "interrupted"))
    assert "ignoring T_max = 20 of the scheduler passed in: using 8 from the checkpoint" in caplog.text
    assert "ignoring initial_lr = 0.5 of the optimizer passed in" in caplog.text
    for a, b in zip(uninterrupted.unwrapped_model().parameters(), again.unwrapped_model().parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ps: (SGD(ps, lr=0.1), None), "optimizer torch:SGD, got torch:AdamW"),
        (lambda ps: ("adamw8bit", None), "optimizer whimbrel:AdamW8bit, got torch:AdamW"),
        (
            lambda ps: (own := AdamW(ps, lr=0.1), LinearLR(own)),
            "scheduler torch:LinearLR, got whimbrel:Schedule",
        ),
    ],
)
def test_another_optimizer_class_raises(run: Make, make: Any, message: str) -> None:
    run(2, lambda ps: (AdamW(ps, lr=0.1), None))
    with pytest.raises(CheckpointError, match=message) as refused:
        run(3, make)
    assert "\n" not in str(refused.value)


def test_another_scheduler_class_raises(run: Make) -> None:
    run(2, lambda ps: (own := SGD(ps, lr=0.1), StepLR(own, 2)))
    with pytest.raises(CheckpointError, match="scheduler torch:LinearLR, got torch:StepLR"):
        run(3, lambda ps: (own := SGD(ps, lr=0.1), LinearLR(own)))
    with pytest.raises(CheckpointError, match="scheduler whimbrel:Schedule, got torch:StepLR"):
        run(3, lambda ps: (SGD(ps, lr=0.1), None))
