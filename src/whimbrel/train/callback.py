"""Callbacks watch a run and ask things of it; they never change its mathematics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from whimbrel.train.state import TrainerControl

__all__ = ["Callbacks", "StopRequest", "TrainerCallback", "callback_name"]

EVENTS = (
    "on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_step_end",
    "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_evaluate", "on_predict", "on_save", "on_log",
    "on_prediction_step", "on_log_step", "on_train_metrics", "on_sample", "on_rewind",
)  # fmt: skip
"""Every event, all of which are dispatched."""


class TrainerCallback:
    """Sees what happens in a run. Override what you want to see; every event comes with keywords only.

    All events get `args, state, control, model` (unwrapped), `processing_class, optimizer, lr_scheduler,
    train_dataloader, eval_dataloader, trainer`, and what is named below. A handler may change `control` or return
    another. A callback with `state_dict` and `load_state_dict` is saved in checkpoints under its `name` (its class
    name, where it has none).
    """

    def on_init_end(self, **event: Any) -> TrainerControl | None:
        """The trainer has been constructed; there is no optimizer yet."""

    def on_train_begin(self, **event: Any) -> TrainerControl | None:
        """All parts are ready and a checkpoint, if there was one, has been loaded."""

    def on_train_end(self, **event: Any) -> TrainerControl | None:
        """The last step is done, and the last save is on disk. Also comes when a run fails, to let go of resources."""

    def on_epoch_begin(self, **event: Any) -> TrainerControl | None:
        """A pass over the data begins, or goes on after a resume."""

    def on_epoch_end(self, **event: Any) -> TrainerControl | None:
        """A pass over the data has ended."""

    def on_step_begin(self, **event: Any) -> TrainerControl | None:
        """An optimizer step begins."""

    def on_step_end(self, **event: Any) -> TrainerControl | None:
        """An optimizer step has been given to the device; what is due after it is set in `control`."""

    def on_substep_end(self, **event: Any) -> TrainerControl | None:
        """A micro-batch other than the last of its step has been passed forth and back."""

    def on_pre_optimizer_step(self, **event: Any) -> TrainerControl | None:
        """Gradients are complete and clipped."""

    def on_optimizer_step(self, **event: Any) -> TrainerControl | None:
        """Weights have moved; gradients are still there."""

    def on_evaluate(self, **event: Any) -> TrainerControl | None:
        """An evaluation is done: `metrics`."""

    def on_predict(self, **event: Any) -> TrainerControl | None:
        """A prediction is done: `metrics`."""

    def on_save(self, **event: Any) -> TrainerControl | None:
        """A checkpoint is complete and on disk: `checkpoint` (its path) and `step`.

        `state` is that of the saved step. With `async_save`, the run and `model` may be a few steps ahead; callbacks
        that do not derive from this class are called before the next step.
        """

    def on_log(self, **event: Any) -> TrainerControl | None:
        """Something was logged: `logs`."""

    def on_prediction_step(self, **event: Any) -> TrainerControl | None:
        """A batch has been evaluated."""

    def on_log_step(self, **event: Any) -> TrainerControl | None:
        """Training metrics are about to be logged: `logs` may be changed."""

    def on_train_metrics(self, **event: Any) -> TrainerControl | None:
        """The numbers of a step are known, at most one step later: `metrics` with loss, grad_norm, tokens and more."""

    def on_sample(self, **event: Any) -> TrainerControl | None:
        """The model has written something for people to read: `text`, after `step` steps."""

    def on_rewind(self, **event: Any) -> TrainerControl | None:
        """The run went back to `step`: what was written past it no longer holds."""


class StopRequest(NamedTuple):
    """Who was the first to ask for the end, at which event, and how ("stop" or "abort")."""

    callback: str
    event: str
    kind: str


def callback_name(callback: object) -> str:
    """The callback's own `name`, or that of its class."""
    name = getattr(callback, "name", None)
    return name if isinstance(name, str) else type(callback).__name__


class Callbacks(Sequence[Any]):
    """The callbacks of a trainer in order, and who handles which event."""

    def __init__(self, callbacks: Iterable[object] = ()) -> None:
        self._callbacks: list[object] = []
        self._handlers: dict[str, list[tuple[object, Callable[..., Any]]]] = {}
        self.stopped_by: StopRequest | None = None
        for callback in callbacks:
            self.add(callback)

    @classmethod
    def with_defaults(cls, defaults: Iterable[object], given: Iterable[object]) -> Callbacks:
        """The defaults followed by `given`; a given callback of the same class as a default replaces it."""
        added = list(cls(given))
        kinds = {type(callback) for callback in added}
        return cls([*(callback for callback in defaults if type(callback) not in kinds), *added])

    def __getitem__(self, place: Any) -> Any:
        return self._callbacks[place]

    def __eq__(self, other: object) -> bool:
        return self._callbacks == (other._callbacks if isinstance(other, Callbacks) else other)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, callback: object) -> None:
        """Put one at the end; a class is instantiated."""
        self._callbacks.append(callback() if isinstance(callback, type) else callback)
        self._handlers.clear()

    def pop(self, callback: object) -> object | None:
        """Take out the first of exactly that class, or that very instance, and return it; None where there is none."""
        for index, own in enumerate(self._callbacks):
            if (type(own) is callback) if isinstance(callback, type) else (own is callback):
                self._handlers.clear()
                return self._callbacks.pop(index)
        return None

    def handles(self, event: str) -> bool:
        """Whether anyone would hear `event`."""
        return bool(self._of(event))

    def of(self, event: str) -> list[object]:
        """The callbacks that handle `event`."""
        return [callback for callback, _ in self._of(event)]

    @property
    def expect_saved_model(self) -> bool:
        """Whether a callback was written for another trainer, which calls on_save before the next step."""
        return any(not isinstance(callback, TrainerCallback) for callback in self.of("on_save"))

    def dispatch(self, event: str, control: TrainerControl, **keywords: Any) -> TrainerControl:
        """Tell everyone in turn; the control that holds afterwards.

        At the end of a run everyone is told, whoever fails: they hold files and handlers. The first failure is raised.
        """
        faults = []
        for callback, handler in self._of(event):
            stop, abort = control.should_training_stop, control.should_abort_without_save
            try:
                answer = handler(control=control, **keywords)
            except Exception as fault:
                if event != "on_train_end":
                    raise
                faults.append(fault)
                continue
            if answer is not None and answer is not control:
                control = TrainerControl.succeeding(control, answer)
            control.should_training_stop |= stop  # what was asked before stays asked
            control.should_abort_without_save |= abort
            if self.stopped_by is None and control.should_abort_without_save and not abort:
                self.stopped_by = StopRequest(callback_name(callback), event, "abort")
            elif self.stopped_by is None and control.should_training_stop and not stop:
                self.stopped_by = StopRequest(callback_name(callback), event, "stop")
        if faults:
            raise faults[0]
        return control

    def named(self) -> dict[str, object]:
        """Each callback under a name that does not depend on its place: equal names are counted among themselves."""
        names: dict[str, object] = {}
        for callback in self._callbacks:
            name, count = callback_name(callback), 2
            while name in names:
                name, count = f"{callback_name(callback)}-{count}", count + 1
            names[name] = callback
        return names

    def state_dict(self) -> dict[str, Any]:
        """The state of those that have one, by name."""
        return {name: own.state_dict() for name, own in self.named().items() if hasattr(own, "state_dict")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give each callback its state; one that the checkpoint does not know keeps the state it has."""
        for name, own in self.named().items():
            if name in state and hasattr(own, "load_state_dict"):
                own.load_state_dict(state[name])

    def _of(self, event: str) -> list[tuple[object, Callable[..., Any]]]:
        if event not in self._handlers:
            self._handlers[event] = [
                (own, getattr(own, event))
                for own in self._callbacks
                if callable(getattr(own, event, None)) and getattr(type(own), event, None) is not _plain(event)
            ]
        return self._handlers[event]


def _plain(event: str) -> object:
    """The base class's own handler, which does nothing and need not be called."""
    return getattr(TrainerCallback, event)
