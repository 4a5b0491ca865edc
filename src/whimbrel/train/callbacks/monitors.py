"""Callbacks that watch a run: divergence, early stopping, norms, memory, profiles and samples."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from whimbrel.base.errors import ConfigError
from whimbrel.base.files import PARTIAL
from whimbrel.config import build
from whimbrel.precision import QuantizedWeight
from whimbrel.train.callback import TrainerCallback
from whimbrel.train.config import DivergenceConfig
from whimbrel.train.device import peak_memory
from whimbrel.train.evaluation import find_metric, greater_is_better
from whimbrel.train.state import TrainerControl

__all__ = [
    "DivergenceCallback",
    "EarlyStoppingCallback",
    "MemoryCallback",
    "NormsCallback",
    "ProfilerCallback",
    "SampleCallback",
    "dequantized",
]

Write = Callable[[nn.Module, int], str]
"""Writes a text with the model as it is after so many steps."""


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


class NormsCallback(TrainerCallback):
    """Logs `grad_norm/NAME` (as clipped) and `weight_norm/NAME` (before the update) every so many steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._names: list[str] = []
        self._norms: Tensor | None = None

    def on_pre_optimizer_step(self, **event: Any) -> None:
        """Measure; the numbers stay on the device until the step is over."""
        if (event["state"].global_step + 1) % self._every:
            return
        pairs = [(name, own) for name, own in event["model"].named_parameters() if own.grad is not None]
        if pairs:
            self._names = [name for name, _ in pairs]
            norms = [
                *torch._foreach_norm([own.grad for _, own in pairs]),
                *(dequantized(own).norm() for _, own in pairs),
            ]
            self._norms = torch.stack([norm.float() for norm in norms])

    def on_step_end(self, **event: Any) -> TrainerControl | None:
        """Log what was measured in this step."""
        if self._norms is None:
            return None
        values, self._norms = self._norms.tolist(), None
        keys = [f"{kind}/{name}" for kind in ("grad_norm", "weight_norm") for name in self._names]
        control: TrainerControl = event["trainer"].log(dict(zip(keys, values, strict=True)))
        return control


class MemoryCallback(TrainerCallback):
    """Adds `peak_memory`, in bytes, to what is logged: allocated on a GPU, resident elsewhere."""

    def on_log_step(self, **event: Any) -> None:
        """Add it."""
        event["logs"]["peak_memory"] = peak_memory(event["trainer"].device)


class ProfilerCallback(TrainerCallback):
    """Records the steps from `first` to before `end` into `trace-FIRST-END.json.gz`, which Perfetto and Chrome open."""

    def __init__(self, first: int, end: int) -> None:
        self._first = first
        self._end = end
        self._profile: profile | None = None

    def on_step_begin(self, **event: Any) -> None:
        """Begin where it is due; a run that goes on in between records what is left."""
        state = event["state"]
        if self._profile is None and self._first <= state.global_step < self._end and state.is_world_process_zero:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile = profile(activities=kinds)
            self._profile.start()

    def on_step_end(self, **event: Any) -> None:
        """Write after the last of the steps."""
        if event["state"].global_step >= self._end:
            self._finish(event["trainer"].config.output_dir)

    def on_train_end(self, **event: Any) -> None:
        """Write what there is of a run that ended sooner."""
        self._finish(event["trainer"].config.output_dir)

    def _finish(self, output_dir: Path) -> None:
        if self._profile is not None:
            own, self._profile = self._profile, None
            own.stop()
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            target = Path(output_dir) / f"trace-{self._first}-{self._end}.json.gz"
            partial = target.with_name(f"{PARTIAL}{target.name}")
            own.export_chrome_trace(str(partial))
            os.replace(partial, target)


class SampleCallback(TrainerCallback):
    """Has a text written every so many steps and tells everyone: `on_sample` with `text` and `step`.

    Dropout is off meanwhile, and the random numbers of the run are those that it would have drawn anyway.
    """

    def __init__(self, write: Write, every: int) -> None:
        self._write = write
        self._every = every

    def on_step_end(self, **event: Any) -> TrainerControl | None:
        """Write where it is due."""
        step = event["state"].global_step
        if step % self._every or not event["state"].is_world_process_zero:
            return None
        event["trainer"].flush_metrics()
        text = self._text(event["model"], step)
        control: TrainerControl = event["trainer"].dispatch("on_sample", text=text, step=step)
        return control

    def _text(self, model: nn.Module, step: int) -> str:
        training = model.training
        devices = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
        model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=sorted(devices)):
                return self._write(model, step)
        finally:
            model.train(training)


def dequantized(weight: Tensor) -> Tensor:
    """The weight itself, or, where it is stored as codes, what these stand for."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.detach()
