"""A running mean of the weights."""

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
    """Keeps `mean <- decay mean + (1 - decay) weights` in fp32, updated in place every so many steps.

    The mean is saved in checkpoints and goes on exactly. At the end it is written as a model directory,
    `ema/step-00000500` in the run directory. To evaluate with it: `with ema.swapped(model): trainer.evaluate()`.
    """

    def __init__(self, decay: float, every: int = 1) -> None:
        self._decay = decay
        self._every = every
        self._mean: dict[str, Tensor] = {}

    def on_train_begin(self, **event: Any) -> None:
        """Begin with the weights, unless a checkpoint brought a mean."""
        weights = _weights(event["model"])
        self._mean = self._mean or {
            name: dequantized(own).to(torch.float32, copy=True) for name, own in weights.items()
        }
        if self._mean.keys() != weights.keys():
            odd = min(self._mean.keys() ^ weights.keys())
            raise CheckpointError(f"the saved mean of the weights is that of another model: '{odd}' is in one only")
        self._mean = {name: self._mean[name].to(own.device) for name, own in weights.items()}

    def on_rewind(self, **event: Any) -> None:
        """The checkpoint that the run went back to has brought its mean."""
        self.on_train_begin(**event)

    @torch.no_grad()
    def on_step_end(self, **event: Any) -> None:
        """Move the mean towards the weights."""
        if event["state"].global_step % self._every == 0:
            weights = _weights(event["model"])
            now = [dequantized(weights[name]).float() for name in self._mean]  # those that are fp32 are not copied
            torch._foreach_lerp_(list(self._mean.values()), now, 1 - self._decay)

    def on_train_end(self, **event: Any) -> None:
        """Write the mean as a model, if the run got anywhere."""
        state, output_dir = event["state"], Path(event["trainer"].config.output_dir)
        target = output_dir / "ema" / f"step-{state.global_step:08d}"
        if event.get("output") is not None and state.is_world_process_zero and not target.exists():
            remove_stale(target.parent)
            with self.swapped(event["model"]):
                event["trainer"].save_model(target)

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Within the block the model has the mean for weights; afterwards its own again, to the bit."""
        weights = _weights(model)
        own = {name: weight.detach().clone() for name, weight in weights.items()}
        try:
            _fill(weights, self._mean)
            yield
        finally:
            _fill(weights, own)

    def state_dict(self) -> dict[str, Any]:
        """The mean itself."""
        return {"mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved mean."""
        self._mean = {name: tensor.to(torch.float32, copy=True) for name, tensor in state["mean"].items()}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that training moves, by name."""
    return {name: own for name, own in model.named_parameters() if own.requires_grad}


@torch.no_grad()
def _fill(weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])
