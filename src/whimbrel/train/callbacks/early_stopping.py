"""Ends a run that no longer gets better."""

from __future__ import annotations

import math
from typing import Any

from whimbrel.train.callback import TrainerCallback
from whimbrel.train.metric import find_metric, greater_is_better

__all__ = ["EarlyStoppingCallback"]


class EarlyStoppingCallback(TrainerCallback):
    """Asks for the end after `patience` evaluations in which `metric` was not better than the best by `threshold`."""

    def __init__(
        self, patience: int, threshold: float = 0.0, metric: str = "loss", greater_is_better: bool | None = None
    ) -> None:
        self._patience = patience
        self._threshold = threshold
        self._metric = metric
        self._given = greater_is_better
        self._best: float | None = None
        self._waited = 0

    @property
    def reason(self) -> str:
        """Why it asks, for people."""
        if self._best is None:
            return f"{self._metric} has been NaN in all {self._waited} evaluations"
        return (
            f"{self._metric} has not been better than {self._best} for {self._waited} of {self._patience} evaluations"
        )

    def on_evaluate(self, **event: Any) -> None:
        """Compare; NaN is never better, and any number is better than none so far."""
        value = find_metric(event["metrics"], self._metric)
        if not math.isnan(value) and (self._best is None or self._better(value, self._best)):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        if self._waited >= self._patience:
            event["control"].should_training_stop = True

    def state_dict(self) -> dict[str, Any]:
        """The best so far, and how long ago it was."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._best, self._waited = state["best"], int(state["waited"])

    def _better(self, value: float, best: float) -> bool:
        gain = value - best if greater_is_better(self._metric, self._given) else best - value
        return gain > self._threshold
