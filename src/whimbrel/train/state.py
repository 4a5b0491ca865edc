"""Where a run is, what is asked of it, and how it ended: the objects that callbacks see."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Tally", "TrainOutput", "TrainerControl", "TrainerState"]


class TrainOutput(NamedTuple):
    """How a run ended: optimizer steps done, mean training loss over them, and the sums."""

    global_step: int
    training_loss: float
    metrics: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class TrainerControl:
    """What callbacks ask for. The loop clears each flag once it has been obeyed."""

    should_training_stop: bool = False
    """End after this step, with the final log, evaluation and save that the settings call for."""
    should_epoch_stop: bool = False
    """End this epoch and go on with the next."""
    should_save: bool = False
    """Save after this step."""
    should_evaluate: bool = False
    """Evaluate after this step."""
    should_log: bool = False
    """Log after this step."""
    should_abort_without_save: bool = False
    """End now: no final log, evaluation or save."""

    @classmethod
    def succeeding(cls, old: TrainerControl, new: object) -> TrainerControl:
        """The control that a callback returned, of any class; what `old` asked to end stays asked."""
        asked = {field.name: bool(getattr(new, field.name, False)) for field in dataclasses.fields(cls)}
        for name in ("should_training_stop", "should_epoch_stop", "should_abort_without_save"):
            asked[name] |= getattr(old, name)
        return cls(**asked)

    @property
    def ends_training(self) -> bool:
        """Whether any kind of end was asked for."""
        return self.should_training_stop or self.should_abort_without_save


@dataclass(slots=True, kw_only=True)
class TrainerState:
    """How far a run is and what it has seen."""

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
    """Sums over the steps of a run that a resume takes up, so that means and totals come out as if it never broke."""

    steps: int = 0
    loss: float = 0.0
    unlogged_steps: int = 0
    unlogged_loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    seconds: float = 0.0

    def add(self, loss: float, grad_norm: float, lr: float, seconds: float) -> None:
        """Count a finished step."""
        self.steps, self.unlogged_steps = self.steps + 1, self.unlogged_steps + 1
        self.loss, self.unlogged_loss = self.loss + loss, self.unlogged_loss + loss
        self.grad_norm, self.lr, self.seconds = grad_norm, lr, self.seconds + seconds

    def take_logs(self) -> dict[str, float]:
        """The mean loss since it was last asked for, with the newest norm and rate."""
        logs = {"loss": self.unlogged_loss / self.unlogged_steps, "grad_norm": self.grad_norm, "learning_rate": self.lr}
        self.unlogged_steps, self.unlogged_loss = 0, 0.0
        return logs
