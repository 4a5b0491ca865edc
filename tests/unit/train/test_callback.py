"""Dispatching events to callbacks, and recording the first stop request."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback as TheirCallback
from transformers import TrainerControl as TheirControl

from whimbrel.train.callback import EVENTS, Callbacks, TrainerCallback, TrainerControl


class SetsFlags(TrainerCallback):
    def __init__(self, **flags: bool) -> None:
        self.flags = flags

    def on_step_end(self, **event: Any) -> None:
        for name, value in self.flags.items():
            setattr(event["control"], name, value)


class ReturnsControl(TrainerCallback):
    def on_step_end(self, **event: Any) -> TrainerControl:
        return TrainerControl(should_save=True)


class Named(SetsFlags):
    name = "the named one"


def test_handlers_are_called_with_keywords() -> None:
    events = []

    class All:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("on_"):
                return lambda **event: events.append((name, sorted(event)))
            raise AttributeError(name)

    callbacks = Callbacks([All()])
    for event in EVENTS:
        callbacks.dispatch(event, TrainerControl(), args=1, state=2)
    assert events == [(event, ["args", "control", "state"]) for event in EVENTS]


def test_stop_flags_survive_a_returned_control() -> None:
    callbacks = Callbacks([SetsFlags(should_training_stop=True, should_log=True), ReturnsControl()])
    control = callbacks.dispatch("on_step_end", TrainerControl())
    assert control == TrainerControl(should_training_stop=True, should_save=True)


def test_a_transformers_control_is_accepted() -> None:
    class Theirs(TheirCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TheirControl:
            return TheirControl(should_epoch_stop=True)

    control = Callbacks([Theirs()]).dispatch("on_step_end", TrainerControl(should_training_stop=True), args=1, state=2)
    assert control == TrainerControl(should_training_stop=True, should_epoch_stop=True)


def test_the_first_stop_request_is_recorded() -> None:
    callbacks = Callbacks([SetsFlags(), SetsFlags(should_training_stop=True), Named(should_abort_without_save=True)])
    callbacks.dispatch("on_step_end", TrainerControl())
    assert callbacks.stopped_by == ("SetsFlags", "on_step_end", "stop")
    both = Callbacks([Named(should_training_stop=True, should_abort_without_save=True)])
    both.dispatch("on_step_end", TrainerControl())
    assert both.stopped_by == ("the named one", "on_step_end", "abort")


def test_adding_and_removing_takes_effect_at_once() -> None:
    callbacks = Callbacks([SetsFlags(should_save=True)])
    assert callbacks.dispatch("on_step_end", TrainerControl()).should_save
    own = Named(should_log=True)
    callbacks.add(own)
    callbacks.add(ReturnsControl)
    assert callbacks.dispatch("on_step_end", TrainerControl()).should_save
    assert callbacks.pop(Named(should_log=True)) is None
    assert callbacks.pop(TrainerCallback) is None
    assert callbacks.pop(own) is own
    assert isinstance(callbacks.pop(SetsFlags), SetsFlags)
    assert isinstance(callbacks.pop(ReturnsControl), ReturnsControl)
    assert len(callbacks) == 0
    assert callbacks.dispatch("on_step_end", TrainerControl()) == TrainerControl()


def test_states_are_saved_by_name() -> None:
    class Counts(TrainerCallback):
        def __init__(self, count: int = 0, name: str | None = None) -> None:
            self.count = count
            if name:
                self.name = name

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    saved = Callbacks([SetsFlags(), Counts(1), Counts(2, "two"), Counts(3)]).state_dict()
    assert saved == {"Counts": {"count": 1}, "two": {"count": 2}, "Counts-2": {"count": 3}}
    fresh = [Counts(0, "two"), Counts(), SetsFlags(), Counts(), Counts(9, "new")]
    Callbacks(fresh).load_state_dict(saved)
    assert [getattr(own, "count", None) for own in fresh] == [2, 1, None, 3, 9]
