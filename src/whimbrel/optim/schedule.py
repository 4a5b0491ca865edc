"""The learning rate over a run: a pure function of the step, so that resuming needs no state."""

from __future__ import annotations

import math

from whimbrel.optim.config import ScheduleConfig

__all__ = ["lr_factor"]


def lr_factor(config: ScheduleConfig, step: int, total: int) -> float:
    """The factor of the peak learning rate for the optimizer step `step` (from 0) of `total`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    falling = total * config.cooldown if config.name == "wsd" else total - config.warmup_steps
    left = min(1.0, (total - step) / max(falling, 1))
    match config.name:
        case "constant":
            return 1.0
        case "cosine":
            return config.floor + (1 - config.floor) * 0.5 * (1 - math.cos(math.pi * left))
        case "linear" | "wsd":
            return config.floor + (1 - config.floor) * left
