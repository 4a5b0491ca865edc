"""SIGTERM and SIGINT end a run in good order."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from whimbrel.train.callback import TrainerCallback
from whimbrel.train.state import TrainerControl

__all__ = ["DrainOnSignal"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class DrainOnSignal(TrainerCallback):
    """The first signal finishes the step, saves and stops, without an evaluation; a second one kills.

    Handlers are in place from train begin to train end, and only in a main thread, where Python allows them.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that came."""
        self._found: dict[signal.Signals, Any] = {}

    @property
    def drains(self) -> bool:
        """Whether the run is in a hurry to end."""
        return self.signal is not None

    @property
    def reason(self) -> str | None:
        """Why it asks, for people."""
        return None if self.signal is None else self.signal.name

    def on_train_begin(self, **event: Any) -> None:
        """Listen."""
        del event
        self.signal = None
        if threading.current_thread() is threading.main_thread():
            self._found = {number: signal.signal(number, self._heard) for number in SIGNALS}

    def on_step_end(self, **event: Any) -> None:
        """Ask for a save and the end, once a signal has come."""
        if self.signal is not None:
            control: TrainerControl = event["control"]
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, **event: Any) -> None:
        """It may have come during an evaluation."""
        self.on_step_end(**event)

    def on_save(self, **event: Any) -> None:
        """It may have come during a save; the one that holds this very step is enough."""
        if self.signal is not None:
            event["control"].should_training_stop = True
            event["control"].should_save |= event["step"] != event["state"].global_step

    def on_train_end(self, **event: Any) -> None:
        """Put back what was there."""
        del event
        for number, handler in self._found.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._found = {}

    def _heard(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = signal.Signals(number)
        for own in SIGNALS:
            signal.signal(own, signal.SIG_DFL)
