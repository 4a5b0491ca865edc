"""Callbacks that watch a run: divergence, early stopping, norms, memory, profiles, samples and EMA weights."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.base.files import PARTIAL, remove_stale
from whimbrel.config import build
from whimbrel.distributed.state import copy_full_, is_dtensor, lazy_gather_state, row_orders, to_local
from whimbrel.distributed.strategy import norms, reshard_
from whimbrel.models.layers import eval_mode
from whimbrel.precision import QuantizedWeight
from whimbrel.train.callback import TrainerCallback, TrainerControl
from whimbrel.train.config import DivergenceConfig
from whimbrel.train.device import peak_memory
from whimbrel.train.evaluation import find_metric, greater_is_better

__all__ = [
    "DivergenceCallback",
    "EarlyStoppingCallback",
    "EmaCallback",
    "MemoryCallback",
    "NormsCallback",
    "ProfilerCallback",
    "SampleCallback",
]

GenerateSample = Callable[[nn.Module, int], str]
"""`(model, step) -> text`: generates a sample after `step` steps."""


class DivergenceCallback(TrainerCallback):
    """Stops a run whose training loss diverges; a non-finite loss counts as divergence immediately.

    Detector `ema`: a fast moving average of the loss is far above a slow one. Both are bias-corrected as in Adam, so
    that the first steps of a run do not trigger it. Detector `window`: the mean of the last steps is far above that of
    the best window so far.

    Accepts the settings of the [divergence] section as keyword arguments (`action` defaults to "stop"), or a `config`.
    """

    def __init__(self, config: DivergenceConfig | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError("expected config or keyword arguments for DivergenceCallback, got both: pass only one")
        config = config or build(DivergenceConfig, {"action": "stop", **settings}, "divergence")
        self._config = config
        self._num_steps = 0
        self._fast = 0.0
        self._slow = 0.0
        self._window: deque[float] = deque(maxlen=config.window)
        self._best = math.inf
        self.reason: str | None = None
        """Message for the user once divergence is detected."""

    def on_train_metrics(self, **event: Any) -> None:
        if self._config.action is None:
            return
        step, loss = event["metrics"]["step"], float(event["metrics"]["loss"])
        self.reason = self.reason or self._check(loss, step)
        if self.reason is not None:
            if self._config.action == "abort":
                event["control"].should_abort_without_save = True
            else:
                event["control"].should_training_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": self._num_steps, "fast": self._fast, "slow": self._slow, "window": list(self._window),
            "best": None if math.isinf(self._best) else self._best,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reason = None
        self._num_steps, self._fast, self._slow = int(state["seen"]), float(state["fast"]), float(state["slow"])
        self._window = deque(state["window"], maxlen=self._config.window)
        self._best = math.inf if state["best"] is None else float(state["best"])

    def _check(self, loss: float, step: int) -> str | None:
        if not math.isfinite(loss):
            return f"the loss of step {step - 1} is {loss}"
        current, baseline = self._averages(loss) if self._config.detector == "ema" else self._windows(loss)
        if current - baseline > self._config.threshold:
            return f"the loss diverged: its mean is {current:.4f} at step {step - 1}, up from {baseline:.4f}"
        return None

    def _averages(self, loss: float) -> tuple[float, float]:
        """The fast and the slow moving average."""
        fast, slow = self._config.fast, self._config.slow
        self._num_steps += 1
        self._fast += fast * (loss - self._fast)
        self._slow += slow * (loss - self._slow)
        return self._fast / (1 - (1 - fast) ** self._num_steps), self._slow / (1 - (1 - slow) ** self._num_steps)

    def _windows(self, loss: float) -> tuple[float, float]:
        """The mean of the last window and of the best one before it."""
        self._window.append(loss)
        if len(self._window) < self._config.window:
            return 0.0, math.inf
        mean, best = sum(self._window) / len(self._window), self._best
        self._best = min(best, mean)
        return mean, best


class EarlyStoppingCallback(TrainerCallback):
    """Stops after `patience` evaluations without an improvement of `metric` by more than `threshold`."""

    def __init__(
        self, patience: int, threshold: float = 0.0, metric: str = "loss", greater_is_better: bool | None = None
    ) -> None:
        self._patience = patience
        self._threshold = threshold
        self._metric = metric
        self._greater_is_better = greater_is_better
        self._best: float | None = None
        self._evals_without_improvement = 0

    @property
    def reason(self) -> str:
        """Why the run stops, printed for the user."""
        if self._best is None:
            return f"{self._metric} was NaN in all {self._evals_without_improvement} evaluations"
        return f"{self._metric} has not improved on {self._best} for {self._evals_without_improvement} evaluations"

    def on_evaluate(self, **event: Any) -> None:
        """Compare with the best value; NaN is never an improvement."""
        value = find_metric(event["metrics"], self._metric)
        sign = 1 if greater_is_better(self._metric, self._greater_is_better) else -1
        if not math.isnan(value) and (self._best is None or sign * (value - self._best) > self._threshold):
            self._best, self._evals_without_improvement = value, 0
        else:
            self._evals_without_improvement += 1
        if self._evals_without_improvement >= self._patience:
            event["control"].should_training_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._evals_without_improvement}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best, self._evals_without_improvement = state["best"], int(state["waited"])


class NormsCallback(TrainerCallback):
    """Logs `grad_norm/NAME` (after clipping) and `weight_norm/NAME` (before the update) every `every` steps."""

    all_ranks = True  # each has shards

    def __init__(self, every: int) -> None:
        self._every = every
        self._names: list[str] = []
        self._norms: Tensor | None = None

    def on_pre_optimizer_step(self, **event: Any) -> None:
        """Compute the norms; they stay on the device until the end of the step."""
        if (event["state"].global_step + 1) % self._every:
            return
        parameters = [(name, weight) for name, weight in event["model"].named_parameters() if weight.grad is not None]
        if parameters:
            self._names = [name for name, _ in parameters]
            found = [
                *norms([weight.grad for _, weight in parameters]),
                *norms([_dequantized(weight) for _, weight in parameters]),
            ]
            self._norms = torch.stack([norm.float() for norm in found])

    def on_step_end(self, **event: Any) -> TrainerControl | None:
        if self._norms is None:
            return None
        values, self._norms = self._norms.tolist(), None
        keys = [f"{kind}/{name}" for kind in ("grad_norm", "weight_norm") for name in self._names]
        control: TrainerControl = event["trainer"].log(dict(zip(keys, values, strict=True)))
        return control


class MemoryCallback(TrainerCallback):
    """Adds `peak_memory` in bytes to the logs: allocated on a GPU, resident set size on the CPU."""

    def on_log_step(self, **event: Any) -> None:
        event["logs"]["peak_memory"] = peak_memory(event["trainer"].device)


class ProfilerCallback(TrainerCallback):
    """Records steps `first` to `end` - 1 to `trace-FIRST-END.json.gz`, for Perfetto or chrome://tracing."""

    def __init__(self, first: int, end: int) -> None:
        self._first = first
        self._end = end
        self._profile: profile | None = None

    def on_step_begin(self, **event: Any) -> None:
        """Start recording; a run resumed inside the range records the rest of it."""
        state = event["state"]
        if self._profile is None and self._first <= state.global_step < self._end and state.is_world_process_zero:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile = profile(activities=activities)
            self._profile.start()

    def on_step_end(self, **event: Any) -> None:
        """Write the trace after the last step of the range."""
        if event["state"].global_step >= self._end:
            self._finish(event["trainer"].config.output_dir)

    def on_train_end(self, **event: Any) -> None:
        """Write the trace of a run that ended inside the range."""
        self._finish(event["trainer"].config.output_dir)

    def _finish(self, output_dir: Path) -> None:
        if self._profile is not None:
            recorded, self._profile = self._profile, None
            recorded.stop()
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            target = Path(output_dir) / f"trace-{self._first}-{self._end}.json.gz"
            partial = target.with_name(f"{PARTIAL}{target.name}")
            recorded.export_chrome_trace(str(partial))
            os.replace(partial, target)


class SampleCallback(TrainerCallback):
    """Generates a sample every `every` steps and dispatches `on_sample` with `text` and `step`.

    The model is in eval mode while sampling, and the RNG state is restored, so that sampling does not affect training.
    """

    def __init__(self, sample: GenerateSample, every: int) -> None:
        self._sample = sample
        self._every = every

    def on_step_end(self, **event: Any) -> TrainerControl | None:
        """Generate a sample if one is due."""
        step = event["state"].global_step
        if step % self._every or not event["state"].is_world_process_zero:
            return None
        event["trainer"].flush_metrics()
        text = self._generate(event["model"], step)
        control: TrainerControl = event["trainer"].dispatch("on_sample", text=text, step=step)
        return control

    def _generate(self, model: nn.Module, step: int) -> str:
        devices = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
        with eval_mode(model), torch.random.fork_rng(devices=sorted(devices)):
            return self._sample(model, step)


class EmaCallback(TrainerCallback):
    """Maintains `ema = decay * ema + (1 - decay) * weights` in fp32, updated in place every `every` steps.

    The average is saved in checkpoints. At the end of training it is written as a model directory,
    `ema/step-00000500` in the run directory. To evaluate with it:
    `with ema.average_parameters(model): trainer.evaluate()`. If weights are sharded, each rank averages its shards.
    """

    all_ranks = True

    def __init__(self, decay: float, every: int = 1) -> None:
        self._decay = decay
        self._every = every
        self._model: nn.Module | None = None
        self._average: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_train_begin(self, **event: Any) -> None:
        """Initialize the average with the weights, unless it was restored from a checkpoint."""
        self._model, weights = event["model"], _trainable_parameters(event["model"])
        self._average = self._average or {
            name: _dequantized(weight).to(torch.float32, copy=True) for name, weight in weights.items()
        }
        if self._average.keys() != weights.keys():
            mismatched = min(self._average.keys() ^ weights.keys())
            raise CheckpointError(
                f"the EMA weights in the checkpoint do not match this model ('{mismatched}' is only in one of them)"
            )
        orders = row_orders(event["model"])
        self._average = {
            name: _split_like(weight, self._average[name], orders.get(name)) for name, weight in weights.items()
        }

    def on_rollback(self, **event: Any) -> None:
        """Use the average of the restored checkpoint."""
        self.on_train_begin(**event)

    @torch.no_grad()
    def on_step_end(self, **event: Any) -> None:
        if event["state"].global_step % self._every == 0:
            weights = _trainable_parameters(event["model"])
            current = [to_local(_dequantized(weights[name])).float() for name in self._average]  # fp32 is not copied
            torch._foreach_lerp_([to_local(mean) for mean in self._average.values()], current, 1 - self._decay)

    def on_train_end(self, **event: Any) -> None:
        """Save the average as a model directory, unless training failed."""
        trainer = event["trainer"]
        parent = Path(trainer.config.output_dir) / "ema"
        target = parent / f"step-{event['state'].global_step:08d}"
        if event.get("output") is not None and not trainer.world.run_on_main(target.exists):
            trainer.world.run_on_main(partial(remove_stale, parent))
            with self.average_parameters(event["model"]):
                trainer.save_model(target)

    @contextmanager
    def average_parameters(self, model: nn.Module) -> Iterator[None]:
        """Use the average as the model's weights inside the block; afterwards the weights are restored exactly."""
        weights = _trainable_parameters(model)
        original = {name: weight.detach().clone() for name, weight in weights.items()}
        try:
            _copy_into(weights, self._average)
            yield
        finally:
            _copy_into(_trainable_parameters(model), original)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._average if self._model is None else lazy_gather_state(self._model, self._average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._average = {name: tensor.to(torch.float32, copy=True) for name, tensor in state["mean"].items()}


def _split_like(weight: Tensor, mean: Tensor, order: Tensor | None) -> Tensor:
    """An average with the device of a weight, and sharded like it."""
    if not is_dtensor(weight) or is_dtensor(mean):
        return mean.to(weight.device)
    split = torch.empty_like(weight, dtype=torch.float32)
    copy_full_(split, mean, order)
    return split


def _trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    reshard_(model)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def _copy_into(weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])


def _dequantized(weight: Tensor) -> Tensor:
    """The weight as a dense tensor, detached."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.detach()
