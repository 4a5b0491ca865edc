"""Drives a run from its first step to its last: what is due after each, who is told, and how it ends."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from whimbrel.base.errors import TrainingError
from whimbrel.checkpoint import CheckpointManager, RNGState, Saved
from whimbrel.optim import whole_steps
from whimbrel.train.batches import Batches
from whimbrel.train.callback import Callbacks, StopRequest
from whimbrel.train.config import TrainerConfig
from whimbrel.train.loop import Loop, NonFiniteError, StepMetrics
from whimbrel.train.state import Tally, TrainerControl, TrainerState

__all__ = ["Driven", "Driver"]

MOST_ROLLBACKS = 3
"""How often a run may go back to one checkpoint before it is given up."""

REMEDY = "lower the learning rate (optim.lr, learning_rate) or clip the gradient (train.clip, max_grad_norm)"
MOST_SKIPS = 100
"""How many steps in a row may be skipped before a run is given up."""

logger = logging.getLogger(__name__)


class EvaluationInterruptedError(Exception):
    """Stops an evaluation between two batches because the run has to stop."""


class Driven(Protocol):
    """What a driver needs of a trainer."""

    config: TrainerConfig
    state: TrainerState
    control: TrainerControl
    tally: Tally
    checkpoint_manager: CheckpointManager
    resumed_from: Path | None
    callbacks: Callbacks
    deferred: set[str]

    def tell(self, event: str, **keywords: Any) -> TrainerControl:
        """Dispatch an event."""

    def tell_saved(self, saved: Saved) -> None:
        """Dispatch `on_save`."""

    def log(self, logs: dict[str, Any]) -> TrainerControl:
        """Log something."""

    def evaluate(self) -> dict[str, float]:
        """Evaluate."""

    def compare(self, metrics: dict[str, float]) -> None:
        """Remember the best evaluation."""

    def save_checkpoint(self, checkpoint_path: str | Path | None = None, *, temporary: bool = False) -> Path:
        """Save."""

    def reserve_saves(self) -> None:
        """Make ready for the first save."""

    def rewind(self) -> int:
        """Go back to the newest checkpoint but for the data, and give its step."""

    @property
    def can_evaluate(self) -> bool:
        """Whether there is anything to evaluate on."""

    @property
    def received_signal(self) -> signal.Signals | None:
        """The signal that asked the run to save and stop."""

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
        self._evaluating = False
        self._save_is_due = False
        self._saved_at = time.monotonic()

    def run(self) -> None:
        """Step until the last step or until someone asks for the end."""
        state, trainer = self._trainer.state, self._trainer
        self._saved_at = time.monotonic()
        if trainer.deferred:
            self._do_deferred()
        while self._goes_on():
            self._batches.begin(state.raw_epoch)
            trainer.control.should_epoch_stop = False
            trainer.tell("on_epoch_begin")
            while self._goes_on():
                try:
                    epoch_ended = self._step()
                except NonFiniteError as fault:
                    self._recover(fault)
                    break
                if epoch_ended:
                    break
        if self._stepped and not trainer.control.should_abort_without_save:
            if state.global_step > state.epoch_start_step and not (trainer.drains and self._before_last_step):
                trainer.tell("on_epoch_end")  # in the middle of a pass
            try:
                self._obey(final=True)
            except NonFiniteError as fault:
                self._recover(fault, final=True)

    def _goes_on(self) -> bool:
        """Whether to run another step: not after the last one, and not once a stop was requested."""
        self._heed_signal("on_step_begin")
        return self._before_last_step and not self._passes_are_done and not self._trainer.control.ends_training

    @property
    def _before_last_step(self) -> bool:
        return self._trainer.state.global_step < self._trainer.state.max_steps

    def _heed_signal(self, event: str) -> None:
        """Request a save and a stop once a signal was received."""
        trainer, received = self._trainer, self._trainer.received_signal
        if received is None or trainer.control.should_abort_without_save:
            return
        trainer.control.should_save = trainer.control.should_training_stop = True
        if trainer.callbacks.stopped_by is None:
            trainer.callbacks.stopped_by = StopRequest(received.name, event, "stop")
            logger.info("Received %s: saving, then stopping", received.name)

    @property
    def _passes_are_done(self) -> bool:
        """Whether a run with a length in epochs has started all of them; callbacks may have ended some early.

        A rollback repeats steps with later data, so after one only the steps count.
        """
        train = self._trainer.config.train
        if train.epochs is None or train.on_nonfinite == "rollback":
            return False
        return self._trainer.state.raw_epoch >= math.ceil(train.epochs)

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
            self._heed_signal("on_step_end")
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
        """Evaluate before a save that needs the metric."""
        control = self._trainer.control
        control.should_save |= due
        self._save_is_due |= due
        control.should_evaluate |= due and self._measures_saves and self._trainer.can_evaluate

    @property
    def _measures_saves(self) -> bool:
        return self._trainer.config.checkpoint.evaluate or self._trainer.config.checkpoint.best is not None

    def _may_evaluate(self) -> bool:
        state, validation = self._trainer.state, self._trainer.config.validation
        passed = state.epoch if validation.each_epoch else state.global_step
        return self._trainer.can_evaluate and passed >= validation.delay

    def _obey(self, *, final: bool) -> None:
        """Log, evaluate and save, each where it was asked for and not yet done at this step."""
        trainer, config = self._trainer, self._trainer.config
        if final and not trainer.control.should_abort_without_save:
            if not (trainer.drains and self._before_last_step):  # an interrupted run is resumed later
                trainer.control.should_log |= config.log.every is not None or config.log.each_epoch
                trainer.control.should_evaluate |= config.validation.at_end and trainer.can_evaluate
                self._save_is_due |= config.checkpoint.at_end
            trainer.control.should_save |= config.checkpoint.at_end
        asked = trainer.control.should_log or trainer.control.should_evaluate or trainer.control.should_save
        if final or asked or self._save_is_overdue:
            self.settle()
            for act in (self._log, self._evaluate, self._save):
                if not trainer.control.should_abort_without_save:
                    act()
        else:
            self._loop.settle(1, self._report)
        for saved in trainer.checkpoint_manager.finished():
            self._rollbacks = 0
            trainer.tell_saved(saved)

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
        trainer, control = self._trainer, self._trainer.control
        measured = self._measures_saves and (self._save_is_due if trainer.drains else control.should_save)
        if (control.should_evaluate or measured) and trainer.can_evaluate and self._first("evaluate"):
            self._evaluate_or_defer()
        trainer.control.should_evaluate = False

    def _evaluate_or_defer(self) -> None:
        """Evaluate, unless the run has to stop at once: then the resumed run starts with this evaluation.

        A signal stops an evaluation in progress. Its RNG state is restored, so that the resumed run repeats it exactly.
        """
        trainer, random = self._trainer, RNGState()
        before, self._evaluating = random.state_dict(), True
        try:
            self.check_evaluation()
            trainer.compare(trainer.evaluate())
        except EvaluationInterruptedError:
            random.load_state_dict(before)
            if not trainer.control.should_abort_without_save:
                trainer.deferred = {"evaluate", *(["save"] if self._save_is_due else [])}
                self._heed_signal("on_prediction_step")
            return
        finally:
            self._evaluating = False
        best = trainer.state.best_global_step == trainer.state.global_step
        trainer.control.should_save |= trainer.config.checkpoint.when_best and best

    def check_evaluation(self) -> None:
        """Called after each batch of an evaluation; stops it if the run has to stop at once."""
        if self._evaluating and (self._trainer.drains or self._trainer.control.should_abort_without_save):
            raise EvaluationInterruptedError

    def _do_deferred(self) -> None:
        """Run the actions deferred by an interrupted run; a checkpoint among them gets its metric now."""
        trainer = self._trainer
        deferred, trainer.deferred = trainer.deferred, set()
        trainer.checkpoint_manager.forget(trainer.state.global_step)
        trainer.control.should_evaluate = "evaluate" in deferred and trainer.can_evaluate
        self._save_is_due = trainer.control.should_save = "save" in deferred
        self._obey(final=False)

    @property
    def _save_is_overdue(self) -> bool:
        minutes = self._trainer.config.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def _save(self) -> None:
        """Save if a save is due, or make a temporary save without a metric if the last one is too long ago."""
        trainer, asked = self._trainer, self._trainer.control.should_save
        if (asked or self._save_is_overdue) and trainer.state.global_step > 0 and self._first("save"):
            with contextlib.suppress(OSError):  # reported when it failed; raised at the end if it was the last save
                trainer.save_checkpoint() if asked else trainer.save_checkpoint(temporary=True)
            self._saved_at = time.monotonic()
        trainer.control.should_save = self._save_is_due = False

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
        self._save_is_due = False
        trainer.deferred = set()
        self._done.clear()
        self._loop.pause()
        logger.warning("%s: went back to step %d, and on with the data that comes next", fault, step)
        trainer.tell("on_rewind", step=step)
