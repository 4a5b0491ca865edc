"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whimbrel.base.errors import CheckpointError
from whimbrel.base.files import remove_stale
from whimbrel.train.callback import TrainerCallback
from whimbrel.train.callbacks.monitors import dequantized

__all__ = ["EmaCallback"]


class EmaCallback(TrainerCallback):
    """Maintains `ema = decay * ema + (1 - decay) * weights` in fp32, updated in place every `every` steps.

    The average is saved in checkpoints. At the end of training it is written as a model directory,
    `ema/step-00000500` in the run directory. To evaluate with it: `with ema.swapped(model): trainer.evaluate()`.
    """

    def __init__(self, decay: float, every: int = 1) -> None:
        self._decay = decay
        self._every = every
        self._average: dict[str, Tensor] = {}

    def on_train_begin(self, **event: Any) -> None:
        """Initialize the average with the weights, unless it was restored from a checkpoint."""
        weights = _weights(event["model"])
        self._average = self._average or {
            name: dequantized(own).to(torch.float32, copy=True) for name, own in weights.items()
        }
        if self._average.keys() != weights.keys():
            odd = min(self._average.keys() ^ weights.keys())
            raise CheckpointError(
                f"expected averaged weights of this model in the checkpoint, got those of another ('{odd}')"
            )
        self._average = {name: self._average[name].to(own.device) for name, own in weights.items()}

    def on_rewind(self, **event: Any) -> None:
        """Use the average of the restored checkpoint."""
        self.on_train_begin(**event)

    @torch.no_grad()
    def on_step_end(self, **event: Any) -> None:
        """Update the average."""
        if event["state"].global_step % self._every == 0:
            weights = _weights(event["model"])
            current = [dequantized(weights[name]).float() for name in self._average]  # fp32 weights are not copied
            torch._foreach_lerp_(list(self._average.values()), current, 1 - self._decay)

    def on_train_end(self, **event: Any) -> None:
        """Save the average as a model directory, unless training failed."""
        state, output_dir = event["state"], Path(event["trainer"].config.output_dir)
        target = output_dir / "ema" / f"step-{state.global_step:08d}"
        if event.get("output") is not None and state.is_world_process_zero and not target.exists():
            remove_stale(target.parent)
            with self.swapped(event["model"]):
                event["trainer"].save_model(target)

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Use the average as the model's weights inside the block; afterwards the weights are restored exactly."""
        weights = _weights(model)
        own = {name: weight.detach().clone() for name, weight in weights.items()}
        try:
            _fill(weights, self._average)
            yield
        finally:
            _fill(weights, own)

    def state_dict(self) -> dict[str, Any]:
        """The average."""
        return {"mean": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved average."""
        self._average = {name: tensor.to(torch.float32, copy=True) for name, tensor in state["mean"].items()}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters by name."""
    return {name: own for name, own in model.named_parameters() if own.requires_grad}


@torch.no_grad()
def _fill(weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])
