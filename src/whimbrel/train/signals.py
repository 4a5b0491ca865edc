"""SIGTERM and SIGINT end a run in good order."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["SIGNALS", "SignalHandler"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalHandler:
    """Notes the first signal in `received`, for the training loop to look at; a second one kills.

    Handlers are in place within the `with` block, and only in the main thread: Python allows them nowhere else.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalHandler:
        self.received = None
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = signal.Signals(number)
        for own in SIGNALS:
            signal.signal(own, signal.SIG_DFL)
