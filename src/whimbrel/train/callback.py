"""The callback API: `TrainerState`, `TrainerControl`, `TrainerCallback`, and the list that dispatches events.

Callbacks observe a run and request actions through `control`; they never change the computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "Callbacks",
    "RunningTotals",
    "StopRequest",
    "TrainOutput",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "callback_name",
]

EVENTS = (
    "on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_step_end",
    "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_evaluate", "on_predict", "on_save", "on_log",
    "on_prediction_step", "on_log_step", "on_train_metrics", "on_sample", "on_rollback",
)  # fmt: skip
"""Every event that is dispatched."""


class TrainOutput(NamedTuple):
    """Result of `train()`: the number of optimizer steps, the mean training loss over them, and totals."""

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
    def merge(cls, old: TrainerControl, new: object) -> TrainerControl:
        """Convert a control object returned by a callback (any class), keeping the stop flags of `old`."""
        flags = {field.name: bool(getattr(new, field.name, False)) for field in dataclasses.fields(cls)}
        for name in ("should_training_stop", "should_epoch_stop", "should_abort_without_save"):
            flags[name] |= getattr(old, name)
        return cls(**flags)

    @property
    def should_stop(self) -> bool:
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
class RunningTotals:
    """Sums over the steps of a run, saved in checkpoints: means and totals include the steps before a resume."""

    steps: int = 0
    loss: float = 0.0
    unlogged_steps: int = 0
    unlogged_loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    seconds: float = 0.0
    unlogged_metrics: dict[str, list[float]] = field(default_factory=dict)
    """Sum and number of values of each metric of the objective, which it may report in some steps only."""

    def add(self, loss: float, grad_norm: float, lr: float, seconds: float, metrics: dict[str, float]) -> None:
        """Add a finished step; `metrics` come from the objective."""
        self.steps, self.unlogged_steps = self.steps + 1, self.unlogged_steps + 1
        self.loss, self.unlogged_loss = self.loss + loss, self.unlogged_loss + loss
        self.grad_norm, self.lr, self.seconds = grad_norm, lr, self.seconds + seconds
        for name, value in metrics.items():
            total, count = self.unlogged_metrics.get(name, (0.0, 0))
            self.unlogged_metrics[name] = [total + value, count + 1]

    def pop_logs(self) -> dict[str, float]:
        """The mean loss and metrics since the last call, with the newest gradient norm and learning rate."""
        logs = {"loss": self.unlogged_loss / self.unlogged_steps, "grad_norm": self.grad_norm, "learning_rate": self.lr}
        logs |= {name: total / count for name, (total, count) in self.unlogged_metrics.items()}
        self.unlogged_steps, self.unlogged_loss, self.unlogged_metrics = 0, 0.0, {}
        return logs


class TrainerCallback:
    """Base class of callbacks. Override the events to handle; they are called with keyword arguments only.

    All events get `args, state, control, model` (unwrapped), `processing_class, optimizer, lr_scheduler,
    train_dataloader, eval_dataloader, trainer`, and the arguments named below. A handler may change `control` or
    return another. A callback with `state_dict` and `load_state_dict` is saved in checkpoints under its `name`
    (default: its class name). With several processes, only rank 0 calls it, unless it sets `all_ranks`.
    """

    all_ranks: bool = False
    """Call the handlers on every rank, which collectives require (gathering FSDP weights, for example). All ranks then
    get the same events; only rank 0's changes to `control` count.
    """

    def on_init_end(self, **event: Any) -> TrainerControl | None:
        """The trainer has been constructed; there is no optimizer yet."""

    def on_train_begin(self, **event: Any) -> TrainerControl | None:
        """Training starts; model and optimizer are ready and a checkpoint, if any, is loaded: `summary`."""

    def on_train_end(self, **event: Any) -> TrainerControl | None:
        """The last step is done, and the last save is on disk: `output`, `checkpoint` (the newest) and `stopped_by`.

        Also called when a run fails, to release resources; `output` is None then.
        """

    def on_epoch_begin(self, **event: Any) -> TrainerControl | None:
        """An epoch starts, or continues after a resume."""

    def on_epoch_end(self, **event: Any) -> TrainerControl | None:
        """An epoch has ended."""

    def on_step_begin(self, **event: Any) -> TrainerControl | None:
        """An optimizer step starts."""

    def on_step_end(self, **event: Any) -> TrainerControl | None:
        """An optimizer step has been submitted to the device; `control` says what is due after it."""

    def on_substep_end(self, **event: Any) -> TrainerControl | None:
        """A micro-batch other than the last of its step has finished forward and backward."""

    def on_pre_optimizer_step(self, **event: Any) -> TrainerControl | None:
        """Gradients are complete and clipped."""

    def on_optimizer_step(self, **event: Any) -> TrainerControl | None:
        """Weights have been updated; gradients are still available."""

    def on_evaluate(self, **event: Any) -> TrainerControl | None:
        """An evaluation is done: `metrics`."""

    def on_predict(self, **event: Any) -> TrainerControl | None:
        """A prediction is done: `metrics`."""

    def on_save(self, **event: Any) -> TrainerControl | None:
        """A checkpoint is complete and on disk: `checkpoint` (its path) and `step`.

        `state` belongs to the saved step. With `async_save`, the run and `model` may be a few steps ahead; callbacks
        that do not derive from this class are called before the next step.
        """

    def on_log(self, **event: Any) -> TrainerControl | None:
        """Metrics were logged: `logs`, and `kind`: "evaluation" right before on_evaluate, else "metrics"."""

    def on_prediction_step(self, **event: Any) -> TrainerControl | None:
        """A batch has been evaluated."""

    def on_log_step(self, **event: Any) -> TrainerControl | None:
        """Training metrics are about to be logged: `logs` may be changed."""

    def on_train_metrics(self, **event: Any) -> TrainerControl | None:
        """The metrics of a step arrived, at most one step late: `metrics` with loss, grad_norm, tokens and more."""

    def on_sample(self, **event: Any) -> TrainerControl | None:
        """A sample was generated: `text`, after `step` steps."""

    def on_rollback(self, **event: Any) -> TrainerControl | None:
        """The run rolled back to `step`: anything logged after it is obsolete."""


class StopRequest(NamedTuple):
    """The first callback (or signal) that requested a stop, the event at which it did, and how ("stop" or "abort")."""

    callback: str
    event: str
    kind: str


def callback_name(callback: object) -> str:
    """The callback's `name`, or its class name."""
    name = getattr(callback, "name", None)
    return name if isinstance(name, str) else type(callback).__name__


class Callbacks(Sequence[Any]):
    """The callbacks of a trainer in order, with an index of handlers per event."""

    def __init__(self, callbacks: Iterable[object] = ()) -> None:
        self._callbacks: list[object] = []
        self._handlers: dict[str, list[tuple[object, Callable[..., Any]]]] = {}
        self.stopped_by: StopRequest | None = None
        self.is_main = True
        """Whether to call all callbacks, or (on ranks other than 0) only those with `all_ranks`."""
        for callback in callbacks:
            self.add(callback)

    @classmethod
    def with_defaults(cls, defaults: Iterable[object], added: Iterable[object]) -> Callbacks:
        """The defaults followed by `added`; an added callback of the same class as a default replaces it."""
        added = list(cls(added))
        added_types = {type(callback) for callback in added}
        return cls([*(callback for callback in defaults if type(callback) not in added_types), *added])

    def __getitem__(self, index: Any) -> Any:
        return self._callbacks[index]

    def __eq__(self, other: object) -> bool:
        return self._callbacks == (other._callbacks if isinstance(other, Callbacks) else other)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, callback: object) -> None:
        """Append a callback; a class is instantiated."""
        self._callbacks.append(callback() if isinstance(callback, type) else callback)
        self._handlers.clear()

    def pop(self, callback: object) -> object | None:
        """Remove and return the first callback of exactly that class, or that instance; None if there is none."""
        for index, other in enumerate(self._callbacks):
            if (type(other) is callback) if isinstance(callback, type) else (other is callback):
                self._handlers.clear()
                return self._callbacks.pop(index)
        return None

    def handles(self, event: str) -> bool:
        """Whether a callback handles `event`."""
        return bool(self._handlers_of(event))

    def handling(self, event: str) -> list[object]:
        """The callbacks that handle `event`."""
        return [callback for callback, _ in self._handlers_of(event)]

    @property
    def waits_for_save(self) -> bool:
        """Whether a third-party callback handles on_save; such callbacks expect `model` to be the saved one."""
        return any(not isinstance(callback, TrainerCallback) for callback in self.handling("on_save"))

    def dispatch(self, event: str, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Call the handlers in order and return the resulting control.

        `on_train_end` reaches every callback even if one raises, since they release files and sockets there;
        the first exception is raised afterwards.
        """
        errors = []
        for callback, handler in self._handlers_of(event):
            stop, abort = control.should_training_stop, control.should_abort_without_save
            try:
                returned = handler(control=control, **kwargs)
            except Exception as error:
                if event != "on_train_end":
                    raise
                errors.append(error)
                continue
            if returned is not None and returned is not control:
                control = TrainerControl.merge(control, returned)
            control.should_training_stop |= stop  # a requested stop stays requested
            control.should_abort_without_save |= abort
            if self.stopped_by is None and control.should_abort_without_save and not abort:
                self.stopped_by = StopRequest(callback_name(callback), event, "abort")
            elif self.stopped_by is None and control.should_training_stop and not stop:
                self.stopped_by = StopRequest(callback_name(callback), event, "stop")
        if errors:
            raise errors[0]
        return control

    def by_name(self) -> dict[str, object]:
        """Callbacks by a name that does not depend on their position; duplicates get a number: `Name-2`."""
        names: dict[str, object] = {}
        for callback in self._callbacks:
            name, count = callback_name(callback), 2
            while name in names:
                name, count = f"{callback_name(callback)}-{count}", count + 1
            names[name] = callback
        return names

    def state_dict(self) -> dict[str, Any]:
        """The states of callbacks that have one, by name."""
        return {
            name: callback.state_dict() for name, callback in self.by_name().items() if hasattr(callback, "state_dict")
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the callbacks that have a state in the checkpoint."""
        for name, callback in self.by_name().items():
            if name in state and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(state[name])

    def _handlers_of(self, event: str) -> list[tuple[object, Callable[..., Any]]]:
        if event not in self._handlers:
            self._handlers[event] = [
                (callback, getattr(callback, event))
                for callback in self._callbacks
                if (self.is_main or getattr(callback, "all_ranks", False))
                and callable(getattr(callback, event, None))
                and getattr(type(callback), event, None) is not getattr(TrainerCallback, event)
            ]
        return self._handlers[event]
