"""Text that the model writes during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from whimbrel.train.callback import TrainerCallback
from whimbrel.train.state import TrainerControl

__all__ = ["SampleCallback", "Write"]

Write = Callable[[nn.Module, int], str]
"""Writes a text with the model as it is after so many steps."""


class SampleCallback(TrainerCallback):
    """Has a text written every so many steps and tells everyone: `on_sample` with `text` and `step`.

    Dropout is off meanwhile, and the random numbers of the run are those that it would have drawn anyway.
    """

    def __init__(self, write: Write, every: int) -> None:
        self._write = write
        self._every = every

    def on_step_end(self, **event: Any) -> TrainerControl | None:
        """Write where it is due."""
        step = event["state"].global_step
        if step % self._every or not event["state"].is_world_process_zero:
            return None
        event["trainer"].settle()
        text = self._text(event["model"], step)
        control: TrainerControl = event["trainer"].tell("on_sample", text=text, step=step)
        return control

    def _text(self, model: nn.Module, step: int) -> str:
        training = model.training
        devices = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
        model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=sorted(devices)):
                return self._write(model, step)
        finally:
            model.train(training)
