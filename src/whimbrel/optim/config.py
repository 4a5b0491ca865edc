"""What a run says about its optimizer and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from whimbrel.base.errors import ConfigError

__all__ = ["OptimConfig", "ScheduleConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The optimizer and its settings. Muon moves the hidden matrices; everything else is moved by Adam."""

    name: Literal["adamw", "muon"] = "adamw"
    """Which optimizer: adamw for every parameter, or muon for hidden matrices and adam for the rest."""
    lr: float = 3e-4
    """Peak learning rate; with muon, of the hidden matrices."""
    embedding_lr: float | None = None
    """Peak learning rate of the embeddings; not given: lr."""
    head_lr: float | None = None
    """Peak learning rate of an untied head; not given: lr."""
    scalar_lr: float | None = None
    """Peak learning rate of norms, biases and other parameters of fewer than two dimensions; not given: lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's first and second moment."""
    eps: float = 1e-8
    """Adam's guard against division by zero."""
    weight_decay: float = 0.01
    """Decoupled weight decay, times the learning rate."""
    decay: Literal["all", "matrices", "hidden"] = "matrices"
    """Which parameters decay: all, those of two or more dimensions, or the hidden matrices alone."""
    momentum: float = 0.95
    """Muon's momentum."""
    momentum_start: float | None = None
    """Muon's momentum at the first step, rising to momentum over momentum_warmup steps; not given: momentum."""
    momentum_warmup: int = 0
    """Over how many steps Muon's momentum rises."""

    def __post_init__(self) -> None:
        for name in ("lr", "embedding_lr", "head_lr", "scalar_lr", "eps", "weight_decay", "momentum_warmup"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"optim.{name} = {value} must not be negative")
        for name, value in (*(("betas", beta) for beta in self.betas), ("momentum", self.momentum)):
            if not 0 <= value < 1:
                raise ConfigError(f"optim.{name} holds {value}: it must be at least 0 and below 1")
        if self.momentum_start is not None and not 0 <= self.momentum_start < 1:
            raise ConfigError(f"optim.momentum_start = {self.momentum_start} must be at least 0 and below 1")
        if (self.momentum_start is None) != (self.momentum_warmup == 0):
            raise ConfigError("optim.momentum_start and optim.momentum_warmup go together: give both or neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run, as a factor of its peak."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After the warm-up: constant; linear or cosine fall to the end; wsd holds, then falls linearly over cooldown."""
    warmup_steps: int = 0
    """Steps over which the factor rises linearly from 1/warmup_steps to 1."""
    cooldown: float = 0.2
    """With wsd: the last fraction of the run over which the factor falls."""
    floor: float = 0.0
    """The factor at the end of a falling schedule."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"schedule.warmup_steps = {self.warmup_steps} must not be negative")
        for name in ("cooldown", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"schedule.{name} = {getattr(self, name)} must be between 0 and 1")
