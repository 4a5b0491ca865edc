"""Progress, control flags and result of a run: the objects that callbacks see."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Tally", "TrainOutput", "TrainerControl", "TrainerState"]


class TrainOutput(NamedTuple):
    """Result of `train()`: optimizer steps done, mean training loss over them, and totals."""

    global_step: int
    training_loss: float
    metrics: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class TrainerControl:
    """Flags set by callbacks to request actions. The loop clears each flag once it is handled."""

    should_training_stop: bool = False
    """Stop after this step, with the configured final log, evaluation and save."""
    should_epoch_stop: bool = False
    """End this epoch and continue with the next."""
    should_save: bool = False
    """Save after this step."""
    should_evaluate: bool = False
    """Evaluate after this step."""
    should_log: bool = False
    """Log after this step."""
    should_abort_without_save: bool = False
    """Stop now: no final log, evaluation or save."""

    @classmethod
    def succeeding(cls, old: TrainerControl, new: object) -> TrainerControl:
        """Convert a control object returned by a callback (any class), keeping the stop flags of `old`."""
        flags = {field.name: bool(getattr(new, field.name, False)) for field in dataclasses.fields(cls)}
        for name in ("should_training_stop", "should_epoch_stop", "should_abort_without_save"):
            flags[name] |= getattr(old, name)
        return cls(**flags)

    @property
    def ends_training(self) -> bool:
        """Whether a stop of any kind was requested."""
        return self.should_training_stop or self.should_abort_without_save


@dataclass(slots=True, kw_only=True)
class TrainerState:
    """Progress of a run, with the fields of `transformers.TrainerState`."""

    logging_steps: int = 0
    eval_steps: int = 0
    save_steps: int = 0
    train_batch_size: int = 0
    max_steps: int = 0
    num_train_epochs: float = 0.0
    max_eval_steps: int = -1
    global_step: int = 0
    epoch: float = 0.0
    epoch_start_step: int = 0
    raw_epoch: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None


@dataclass(slots=True)
class Tally:
    """Sums over the steps of a run, saved in checkpoints: means and totals include the steps before a resume."""

    steps: int = 0
    loss: float = 0.0
    unlogged_steps: int = 0
    unlogged_loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    seconds: float = 0.0

    def add(self, loss: float, grad_norm: float, lr: float, seconds: float) -> None:
        """Add a finished step."""
        self.steps, self.unlogged_steps = self.steps + 1, self.unlogged_steps + 1
        self.loss, self.unlogged_loss = self.loss + loss, self.unlogged_loss + loss
        self.grad_norm, self.lr, self.seconds = grad_norm, lr, self.seconds + seconds

    def take_logs(self) -> dict[str, float]:
        """The mean loss since the last call, with the newest gradient norm and learning rate."""
        logs = {"loss": self.unlogged_loss / self.unlogged_steps, "grad_norm": self.grad_norm, "learning_rate": self.lr}
        self.unlogged_steps, self.unlogged_loss = 0, 0.0
        return logs
