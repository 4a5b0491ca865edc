"""Notices a training loss that runs away."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from whimbrel.base.errors import ConfigError
from whimbrel.config import build
from whimbrel.train.callback import TrainerCallback
from whimbrel.train.settings import DivergenceConfig

__all__ = ["DivergenceCallback"]


class DivergenceCallback(TrainerCallback):
    """Asks for the end of a run whose loss diverges. A loss that is not finite is divergence at once.

    ema: a mean that follows the loss fast is far above one that follows it slowly. Both are corrected for their first
    steps, so that each is a weighted mean of the losses there were and a young run raises no alarm.
    window: the mean of the last steps is far above that of the best such window before.

    Takes the settings of the [divergence] section as keywords (`action` defaults to "stop"), or as a `config`.
    """

    def __init__(self, config: DivergenceConfig | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError("expected either config or keyword settings for DivergenceCallback, got both")
        config = config or build(DivergenceConfig, {"action": "stop", **settings}, "divergence")
        self._config = config
        self._seen = 0
        self._fast = 0.0
        self._slow = 0.0
        self._window: deque[float] = deque(maxlen=config.window)
        self._best = math.inf
        self.reason: str | None = None
        """What was noticed, for people; None while all is well."""

    def on_train_metrics(self, **event: Any) -> None:
        """Look at the loss of a step."""
        if self._config.action is None:
            return
        step, loss = event["metrics"]["step"], float(event["metrics"]["loss"])
        self.reason = self.reason or self._look(loss, step)
        if self.reason is not None:
            if self._config.action == "abort":
                event["control"].should_abort_without_save = True
            else:
                event["control"].should_training_stop = True

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far."""
        return {
            "seen": self._seen, "fast": self._fast, "slow": self._slow, "window": list(self._window),
            "best": None if math.isinf(self._best) else self._best,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.reason = None
        self._seen, self._fast, self._slow = int(state["seen"]), float(state["fast"]), float(state["slow"])
        self._window = deque(state["window"], maxlen=self._config.window)
        self._best = math.inf if state["best"] is None else float(state["best"])

    def _look(self, loss: float, step: int) -> str | None:
        if not math.isfinite(loss):
            return f"the loss of step {step - 1} is {loss}"
        now, before = self._means(loss) if self._config.detector == "ema" else self._windows(loss)
        if now - before > self._config.threshold:
            return f"the loss ran away: its mean is {now:.4f} at step {step - 1}, from {before:.4f}"
        return None

    def _means(self, loss: float) -> tuple[float, float]:
        """The fast mean and the slow one."""
        fast, slow = self._config.fast, self._config.slow
        self._seen += 1
        self._fast += fast * (loss - self._fast)
        self._slow += slow * (loss - self._slow)
        return self._fast / (1 - (1 - fast) ** self._seen), self._slow / (1 - (1 - slow) ** self._seen)

    def _windows(self, loss: float) -> tuple[float, float]:
        """The mean of the last window and that of the best before."""
        self._window.append(loss)
        if len(self._window) < self._config.window:
            return 0.0, math.inf
        mean, best = sum(self._window) / len(self._window), self._best
        self._best = min(best, mean)
        return mean, best
