"""Drives a run from its first step to its last: what is due after each, who is told, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from whimbrel.base.errors import TrainingError
from whimbrel.base.logging import get_logger
from whimbrel.checkpoint import CheckpointManager
from whimbrel.optim import whole_steps
from whimbrel.train.batches import Batches
from whimbrel.train.loop import Loop, NonFiniteError, StepMetrics
from whimbrel.train.settings import TrainerConfig
from whimbrel.train.state import Tally, TrainerControl, TrainerState

__all__ = ["Driven", "Driver"]

MOST_ROLLBACKS = 3
"""How often a run may go back to one checkpoint before it is given up."""

REMEDY = "lower the learning rate (optim.lr, learning_rate) or clip the gradient (train.clip, max_grad_norm)"
MOST_SKIPS = 100
"""How many steps in a row may be skipped before a run is given up."""

logger = get_logger(__name__)


class Driven(Protocol):
    """What a driver needs of a trainer."""

    config: TrainerConfig
    state: TrainerState
    control: TrainerControl
    tally: Tally
    checkpoint_manager: CheckpointManager
    resumed_from: Path | None

    def tell(self, event: str, **keywords: Any) -> TrainerControl:
        """Dispatch an event."""

    def log(self, logs: dict[str, Any]) -> TrainerControl:
        """Log something."""

    def evaluate(self) -> dict[str, float]:
        """Evaluate."""

    def compare(self, metrics: dict[str, float]) -> None:
        """Remember the best evaluation."""

    def save_checkpoint(self) -> Path:
        """Save."""

    def reserve_saves(self) -> None:
        """Make ready for the first save."""

    def rewind(self) -> int:
        """Go back to the newest checkpoint but for the data, and give its step."""

    @property
    def can_evaluate(self) -> bool:
        """Whether there is anything to evaluate on."""

    @property
    def drains(self) -> bool:
        """Whether the run was asked to save and end, and nothing else."""


class Driver:
    """One sitting of a run."""

    def __init__(self, trainer: Driven, loop: Loop, batches: Batches, flops: Callable[[int], float]) -> None:
        self._trainer, self._loop, self._batches, self._flops = trainer, loop, batches, flops
        self._done: dict[str, int] = {}
        self._rollbacks = 0
        self._skips = 0
        self._stepped = False
        self._rewound = False

    def run(self) -> None:
        """Step until the last step or until someone asks for the end."""
        state, trainer = self._trainer.state, self._trainer
        while state.global_step < state.max_steps and not trainer.control.ends_training:
            self._batches.begin(state.raw_epoch)
            trainer.control.should_epoch_stop = False
            trainer.tell("on_epoch_begin")
            while state.global_step < state.max_steps and not trainer.control.ends_training:
                try:
                    epoch_ended = self._step()
                except NonFiniteError as fault:
                    self._recover(fault)
                    break
                if epoch_ended:
                    break
        if self._stepped and not trainer.control.should_abort_without_save:
            if state.global_step > state.epoch_start_step and not self._pauses:
                trainer.tell("on_epoch_end")  # in the middle of a pass
            try:
                self._obey(final=True)
            except NonFiniteError as fault:
                self._recover(fault, final=True)

    def _step(self) -> bool:
        """One step and all that is due after it; whether a pass over the data has ended with it."""
        trainer, state = self._trainer, self._trainer.state
        trainer.tell("on_step_begin")
        tokens = self._loop.step(state.global_step + 1)
        if tokens is not None:
            state.global_step += 1
            self._rewound = False
            if not self._stepped:
                self._stepped = True
                trainer.reserve_saves()
            state.num_input_tokens_seen += tokens
            state.total_flos += self._flops(tokens)
            state.epoch = self._batches.epoch
            self._mark_due()
            trainer.tell("on_step_end")
        ended = tokens is None or trainer.control.should_epoch_stop or self._batches.exhausted()
        if ended:
            self._end_epoch(tokens)
        self._obey(final=state.global_step >= state.max_steps or trainer.control.should_training_stop)
        return ended

    def _end_epoch(self, tokens: int | None) -> None:
        trainer, state = self._trainer, self._trainer.state
        if tokens is None and state.global_step == state.epoch_start_step and not self._rewound:
            raise TrainingError(
                f"pass {state.raw_epoch} over the training data gave no batch: a dataset must not be empty, and an "
                "iterable one must begin anew in each pass"
            )
        state.raw_epoch += 1
        state.epoch_start_step = state.global_step
        self._batches.begin(state.raw_epoch)
        state.epoch = self._batches.epoch
        trainer.control.should_log |= trainer.config.log.each_epoch
        trainer.control.should_evaluate |= trainer.config.validation.each_epoch and self._may_evaluate()
        self._mark_save(trainer.config.checkpoint.each_epoch)
        trainer.tell("on_epoch_end")

    def _mark_due(self) -> None:
        """Set what the settings call for after this step; callbacks may still change it."""
        control, config, step = self._trainer.control, self._trainer.config, self._trainer.state.global_step

        def due(every: float | None) -> bool:
            return every is not None and step % whole_steps(every, self._trainer.state.max_steps) == 0

        control.should_log |= due(config.log.every) or (step == 1 and config.log.first)
        control.should_evaluate |= due(config.validation.every) and self._may_evaluate()
        self._mark_save(due(config.checkpoint.every))

    def _mark_save(self, due: bool) -> None:
        """A save that is due brings the evaluation that it is measured by, also where the run pauses at this step."""
        control = self._trainer.control
        control.should_save |= due
        control.should_evaluate |= due and self._measures_saves and self._trainer.can_evaluate

    @property
    def _measures_saves(self) -> bool:
        return self._trainer.config.checkpoint.evaluate or self._trainer.config.checkpoint.best is not None

    @property
    def _pauses(self) -> bool:
        """Whether the run is to save and end before its last step; when it goes on, no trace of that is left."""
        return self._trainer.drains and self._trainer.state.global_step < self._trainer.state.max_steps

    def _may_evaluate(self) -> bool:
        state, validation = self._trainer.state, self._trainer.config.validation
        passed = state.epoch if validation.each_epoch else state.global_step
        return self._trainer.can_evaluate and passed >= validation.delay

    def _obey(self, *, final: bool) -> None:
        """Log, evaluate and save, each where it was asked for and not yet done at this step."""
        trainer, config = self._trainer, self._trainer.config
        if final and not trainer.control.should_abort_without_save:
            if not self._pauses:
                trainer.control.should_log |= config.log.every is not None or config.log.each_epoch
                trainer.control.should_evaluate |= config.validation.at_end and trainer.can_evaluate
            trainer.control.should_save |= config.checkpoint.at_end
        if final or trainer.control.should_log or trainer.control.should_evaluate or trainer.control.should_save:
            self.settle()
            for act in (self._log, self._evaluate, self._save):
                if not trainer.control.should_abort_without_save:
                    act()
        else:
            self._loop.settle(1, self._report)
        for saved in trainer.checkpoint_manager.finished():
            self._rollbacks = 0
            trainer.tell("on_save", checkpoint=saved.path, step=saved.step)

    def settle(self) -> None:
        """Wait for the numbers of every step so far: something else than a step comes next."""
        self._loop.settle(0, self._report)
        self._loop.pause()

    def _log(self) -> None:
        trainer = self._trainer
        if trainer.control.should_log and trainer.tally.unlogged_steps:
            logs: dict[str, Any] = trainer.tally.take_logs()
            trainer.tell("on_log_step", logs=logs)
            trainer.log(logs)
        trainer.control.should_log = False

    def _evaluate(self) -> None:
        trainer, config = self._trainer, self._trainer.config.checkpoint
        before_save = trainer.control.should_save and self._measures_saves and not self._pauses
        if (trainer.control.should_evaluate or before_save) and trainer.can_evaluate and self._first("evaluate"):
            trainer.compare(trainer.evaluate())
            trainer.control.should_save |= (
                config.when_best and trainer.state.best_global_step == trainer.state.global_step
            )
        trainer.control.should_evaluate = False

    def _save(self) -> None:
        trainer = self._trainer
        if trainer.control.should_save and trainer.state.global_step > 0 and self._first("save"):
            trainer.save_checkpoint()
        trainer.control.should_save = False

    def _first(self, what: str) -> bool:
        """Whether `what` has not been done at this step yet."""
        step = self._trainer.state.global_step
        again, self._done[what] = self._done.get(what) == step, step
        return not again

    def _report(self, metrics: StepMetrics) -> None:
        """The numbers of a step have arrived."""
        if not metrics.skipped:
            self._trainer.tally.add(metrics.loss, metrics.grad_norm, metrics.lr, metrics.seconds)
            self._skips = 0
        else:
            self._skips += 1
            fault = NonFiniteError(metrics.step, metrics.loss, metrics.grad_norm)
            logger.warning("%s: it was skipped", fault)
            if self._skips == MOST_SKIPS:
                raise TrainingError(f"{fault}, and so it is for {MOST_SKIPS} steps in a row: {REMEDY}")
        self._trainer.tell("on_train_metrics", metrics=metrics._asdict())

    def _recover(self, fault: NonFiniteError, *, final: bool = False) -> None:
        """Stop, or go back to the newest checkpoint and on with the data that comes next."""
        trainer = self._trainer
        if trainer.config.train.on_nonfinite != "rollback":
            raise TrainingError(f"{fault}: {REMEDY}; nothing was saved since") from fault
        trainer.checkpoint_manager.wait()
        if trainer.checkpoint_manager.current() is None and trainer.resumed_from is None:
            raise TrainingError(
                f"{fault}, and there is no checkpoint to go back to: save in between (checkpoint.every, save_steps)"
            ) from fault
        if self._rollbacks == MOST_ROLLBACKS or final:
            raise TrainingError(f"{fault}, after going back {self._rollbacks} times: {REMEDY}") from fault
        self._rollbacks, self._rewound = self._rollbacks + 1, True
        step = trainer.rewind()
        trainer.control.should_log = trainer.control.should_evaluate = trainer.control.should_save = False
        self._done.clear()
        self._loop.pause()
        logger.warning("%s: went back to step %d, and on with the data that comes next", fault, step)
        trainer.tell("on_rewind", step=step)
