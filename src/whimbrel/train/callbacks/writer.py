"""What the callbacks that write a run's numbers somewhere have in common."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from whimbrel.base.logging import get_logger
from whimbrel.train.callback import TrainerCallback

__all__ = ["LogWriter", "Warnings"]

logger = get_logger(__name__)


REMIND_SECONDS = 600.0
"""Minimum time between two warnings about the same failing output."""


class Warnings:
    """Turns write failures of an output into occasional warnings, so that training continues without its logs."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    @contextlib.contextmanager
    def instead_of(self, *kinds: type[Exception], of: object) -> Iterator[None]:
        """Log errors of these kinds as warnings about the output `of` and skip the rest of the block."""
        try:
            yield
        except kinds as error:
            if time.monotonic() >= self._quiet_until:
                logger.warning("cannot write to %s: %s; training continues", of, " ".join(str(error).split()))
                self._quiet_until = time.monotonic() + REMIND_SECONDS


class LogWriter(TrainerCallback, ABC):
    """Has each evaluation written once: a trainer logs it, and then tells of it in an event of its own.

    So a log with names of an evaluation in it is held back until the next event shows whether it was that log.
    """

    _held: tuple[dict[str, Any], int] | None = None

    @abstractmethod
    def write_log(self, logs: dict[str, Any], step: int) -> None:
        """Write what was logged after so many steps and is no evaluation."""

    def on_log(self, **event: Any) -> None:
        """Whatever is logged; evaluations come by `on_evaluate`."""
        self.release()
        self._held = event["logs"], event["state"].global_step
        if not any(name.startswith("eval_") for name in event["logs"]):
            self.release()

    def release(self, evaluated: Mapping[str, Any] | None = None) -> None:
        """Write the log that is held back, unless it was that of the evaluation that has come now."""
        held, self._held = self._held, None
        if held is not None and (evaluated is None or not evaluated.keys() <= held[0].keys()):
            self.write_log(*held)
