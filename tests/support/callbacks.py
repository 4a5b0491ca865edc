"""Callbacks that interrupt a run."""

from __future__ import annotations

from typing import Any

from whimbrel.train import TrainerCallback


class InterruptAt(TrainerCallback):
    """Ends a run before the step after `step`, as an unhandled signal would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, **event: Any) -> None:
        if event["state"].global_step == self.step:
            raise KeyboardInterrupt
