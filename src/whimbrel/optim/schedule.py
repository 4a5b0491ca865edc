"""The learning rate over a run: a pure function of the step, and the object that applies it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from whimbrel.optim.config import ScheduleConfig, Shape

__all__ = ["Schedule", "lr_factor", "whole_steps"]

DEFAULT_TIMESCALE = 10_000
"""Of inverse_sqrt, where there is no warm-up to take it from."""


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
        """On to the next step."""
        self._step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group, as it stands."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Where it is; the curve itself belongs to the configuration."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` says."""
        self._step = int(state["step"])
        self._apply()

    def _apply(self) -> None:
        factor = self.factor(self._step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # as torch's schedulers do: others may hold on to it
                group["lr"].fill_(group["peak_lr"] * factor)
            else:
                group["lr"] = group["peak_lr"] * factor


def whole_steps(amount: int | float, total: int) -> int:
    """A number of steps that was given as such, or as a share of `total` (a float below 1), which is rounded up."""
    return math.ceil(total * amount) if isinstance(amount, float) else amount


def lr_factor(config: ScheduleConfig, step: int, total: int) -> float:
    """The factor of the peak learning rate for the optimizer step `step` (from 0) of `total`."""
    warmup = whole_steps(config.warmup_steps, total)
    if step < warmup:
        if config.warmup_start is None:
            return (step + 1) / warmup
        return config.warmup_start + (1 - config.warmup_start) * _shaped(config.warmup_shape, step / warmup)
    if config.name == "constant":
        return 1.0
    if config.name == "inverse_sqrt":
        timescale = config.timescale or warmup or DEFAULT_TIMESCALE
        return 1.0 / math.sqrt((step - warmup + timescale) / timescale)
    return config.floor + (1 - config.floor) * _height(config, step, warmup, total)


def _height(config: ScheduleConfig, step: int, warmup: int, total: int) -> float:
    """Where a falling schedule is between its peak, 1, and its floor, 0."""
    falling: float = total - warmup
    end = total
    if config.name == "wsd":
        falling = total * config.cooldown if config.cooldown_steps is None else config.cooldown_steps
        end = total if config.stable_steps is None else warmup + config.stable_steps + int(falling)
    left = max(0.0, min(1.0, (end - step) / max(falling, 1)))
    match config.name:
        case "cosine":
            return _shaped("cosine", left, config.cycles)
        case "cosine_with_restarts":
            falls = (1.0 if config.cycles is None else config.cycles) * ((step - warmup) / max(falling, 1))
            return _shaped("cosine", 1.0 - falls % 1.0) if step < end else 0.0
        case "polynomial":
            return math.pow(left, 1.0 if config.power is None else config.power)
        case "wsd":
            return _shaped(config.cooldown_shape, left, config.cycles)
        case _:
            return left


def _shaped(shape: Shape | None, share: float, cycles: float | None = None) -> float:
    """A rise from 0 to 1 over `share`, or a fall seen from its end; a cosine may wave `cycles` times on the way."""
    if shape == "cosine" and cycles is not None:
        return 0.5 * (1 + math.cos(2 * math.pi * cycles * (1 - share)))
    if shape == "cosine":
        return 0.5 * (1 - math.cos(math.pi * share))
    if shape == "1-sqrt":
        return 1.0 - math.sqrt(1.0 - share)
    return share
