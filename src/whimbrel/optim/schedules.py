"""Learning-rate schedules: a pure function of the step, and the object that applies it to an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from whimbrel.base.errors import ConfigError
from whimbrel.config import build, check_choices, check_unused, to_table

__all__ = ["Schedule", "ScheduleConfig", "lr_factor", "resolve_steps"]

DEFAULT_TIMESCALE = 10_000
"""Default timescale of inverse_sqrt without a warmup."""

Shape = Literal["linear", "cosine", "1-sqrt"]
DEFAULT_COOLDOWN = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run, as a fraction of its peak."""

    name: Literal["constant", "linear", "cosine", "wsd", "cosine_with_restarts", "polynomial", "inverse_sqrt"] = (
        "constant"
    )
    """Schedule after the warmup; wsd (warmup-stable-decay) is constant until its cooldown, and all others except
    constant decay immediately."""
    warmup_steps: int | float = 0
    """Number of warmup steps; a float below 1 is a fraction of the run, rounded up."""
    warmup_start: float | None = None
    """Learning rate at the first warmup step, as a fraction of the peak. With the default, the peak is reached at the
    last warmup step; if set, at the step after it; default: 1/warmup_steps."""
    warmup_shape: Shape | None = None
    """Shape of the warmup from warmup_start; default: linear."""
    cooldown: float = DEFAULT_COOLDOWN
    """With wsd: fraction of the run over which the learning rate decays."""
    cooldown_steps: int | None = None
    """With wsd: number of steps over which the learning rate decays; default: cooldown times the number of steps."""
    cooldown_shape: Shape | None = None
    """With wsd: shape of the decay; default: linear."""
    stable_steps: int | None = None
    """With wsd: number of steps between warmup and cooldown; after the cooldown, the learning rate stays at
    min_lr_ratio; default: the rest of the run."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of the decay, as a fraction of the peak."""
    cycles: float | None = None
    """With cosine, or wsd with cooldown_shape = cosine: number of periods (0.5 if not set). With cosine_with_restarts:
    number of cycles (1 if not set)."""
    power: float | None = None
    """With polynomial: exponent of the remaining fraction of steps; default: 1."""
    timescale: int | None = None
    """With inverse_sqrt: number of steps after the warmup at which the learning rate is 1/sqrt(2) of its peak; default:
    warmup_steps."""

    def __post_init__(self) -> None:
        check_choices("schedule", self)
        fraction = isinstance(self.warmup_steps, float)
        if self.warmup_steps < 0 or (fraction and self.warmup_steps >= 1):
            raise ConfigError(
                f"schedule.warmup_steps: expected an integer >= 0 or a fraction below 1, got {self.warmup_steps}"
            )
        for name in ("cooldown", "min_lr_ratio", "warmup_start"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"schedule.{name}: expected a number from 0 to 1, got {value}")
        for name in ("cooldown_steps", "stable_steps", "cycles", "power", "timescale"):
            value = getattr(self, name)
            if value is not None and (value < 0 or (value == 0 and name == "timescale")):
                raise ConfigError(
                    f"schedule.{name}: expected a number {'>' if name == 'timescale' else '>='} 0, got {value}"
                )
        self._check_unused()
        if self.warmup_shape is not None and self.warmup_start is None:
            raise ConfigError("schedule.warmup_shape requires schedule.warmup_start: set both")
        if self.stable_steps is not None and self.cooldown_steps is None:
            raise ConfigError("schedule.stable_steps requires schedule.cooldown_steps: set both")
        if self.name == "wsd" and self.cycles is not None and self.cooldown_shape != "cosine":
            raise ConfigError("schedule.cycles requires schedule.cooldown_shape = 'cosine' with wsd: set both")

    def _check_unused(self) -> None:
        for name, schedules in SCHEDULES_BY_OPTION.items():
            if self.name not in schedules:
                check_unused("schedule", self, (name,), f"schedule.name = {' or '.join(schedules)}")
        if not self.warmup_steps:
            check_unused("schedule", self, ("warmup_start", "warmup_shape"), "schedule.warmup_steps")
        if self.cooldown_steps is not None and self.cooldown != DEFAULT_COOLDOWN:
            raise ConfigError("schedule.cooldown and schedule.cooldown_steps are mutually exclusive: set only one")

    def with_name(self, name: str) -> ScheduleConfig:
        """The same settings for another schedule."""
        return build(ScheduleConfig, to_table(self) | {"name": name}, "schedule")


SCHEDULES_BY_OPTION = {
    "cooldown": ("wsd",),
    "cooldown_steps": ("wsd",),
    "cooldown_shape": ("wsd",),
    "stable_steps": ("wsd",),
    "min_lr_ratio": ("linear", "cosine", "wsd", "cosine_with_restarts", "polynomial"),
    "cycles": ("cosine", "cosine_with_restarts", "wsd"),
    "power": ("polynomial",),
    "timescale": ("inverse_sqrt",),
}
"""Options accepted by only some schedules; rejected for others, where they would have no effect."""


class Schedule:
    """Sets the learning rate of each group to its `peak_lr` times a factor of the step, now and after each `step()`."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> None:
        self.optimizer = optimizer
        self.factor = factor
        self._step = 0
        for group in optimizer.param_groups:
            group.setdefault("peak_lr", float(group["lr"]))
        self._apply()

    def step(self) -> None:
        self._step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """The current learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The step; the curve itself is part of the configuration."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = int(state["step"])
        self._apply()

    def _apply(self) -> None:
        factor = self.factor(self._step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # in place, like torch's schedulers: others may hold it
                group["lr"].fill_(group["peak_lr"] * factor)
            else:
                group["lr"] = group["peak_lr"] * factor


def resolve_steps(amount: int | float, total: int) -> int:
    """A number of steps: `amount` itself, or if it is a float, that fraction of `total`, rounded up."""
    return math.ceil(total * amount) if isinstance(amount, float) else amount


def lr_factor(config: ScheduleConfig, step: int, total: int) -> float:
    """The factor of the peak learning rate for optimizer step `step` (from 0) of `total`."""
    warmup = resolve_steps(config.warmup_steps, total)
    if step < warmup:
        if config.warmup_start is None:
            return (step + 1) / warmup
        return config.warmup_start + (1 - config.warmup_start) * _shaped(config.warmup_shape, step / warmup)
    if config.name == "constant":
        return 1.0
    if config.name == "inverse_sqrt":
        timescale = config.timescale or warmup or DEFAULT_TIMESCALE
        return 1.0 / math.sqrt((step - warmup + timescale) / timescale)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * _decay(config, step, warmup, total)


def _decay(config: ScheduleConfig, step: int, warmup: int, total: int) -> float:
    """The position of a decaying schedule between its peak (1) and its minimum (0)."""
    length: float = total - warmup
    end = total
    if config.name == "wsd":
        length = total * config.cooldown if config.cooldown_steps is None else config.cooldown_steps
        end = total if config.stable_steps is None else warmup + config.stable_steps + int(length)
    remaining = max(0.0, min(1.0, (end - step) / max(length, 1)))
    match config.name:
        case "cosine":
            return _shaped("cosine", remaining, config.cycles)
        case "cosine_with_restarts":
            position = (1.0 if config.cycles is None else config.cycles) * ((step - warmup) / max(length, 1))
            return _shaped("cosine", 1.0 - position % 1.0) if step < end else 0.0
        case "polynomial":
            return math.pow(remaining, 1.0 if config.power is None else config.power)
        case "wsd":
            return _shaped(config.cooldown_shape, remaining, config.cycles)
        case _:
            return remaining


def _shaped(shape: Shape | None, fraction: float, cycles: float | None = None) -> float:
    """A curve from 0 to 1; for a decay, `fraction` is the remaining fraction. A cosine may have several `cycles`."""
    if shape == "cosine" and cycles is not None:
        return 0.5 * (1 + math.cos(2 * math.pi * cycles * (1 - fraction)))
    if shape == "cosine":
        return 0.5 * (1 - math.cos(math.pi * fraction))
    if shape == "1-sqrt":
        return 1.0 - math.sqrt(1.0 - fraction)
    return fraction
