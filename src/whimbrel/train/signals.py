"""Graceful shutdown on SIGTERM and SIGINT."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["SIGNALS", "SignalHandler"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalHandler:
    """Records the first signal in `received`, which the training loop polls; a second signal kills the process.

    Handlers are installed inside the `with` block, and only in the main thread, as Python requires.
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
