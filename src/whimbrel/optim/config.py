"""What a run says about its optimizer and schedule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from whimbrel.base.errors import ConfigError
from whimbrel.config import build, check_choices, check_unused, to_table

__all__ = ["GroupConfig", "LISTENS", "OptimConfig", "PLAIN_ALONE", "ScheduleConfig", "Shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Settings of their own for the parameters whose names a pattern is found in."""

    pattern: str
    """A regular expression, searched for in the names of parameters; the first group that has a name keeps it."""
    lr: float | None = None
    """Peak learning rate; not given: as for the others."""
    weight_decay: float | None = None
    """Decoupled weight decay; not given: as for the others."""
    rank: int | None = None
    """Rank of the subspace that these matrices, also embeddings and a head, move in; not given: as for the others."""
    subspace: bool | None = None
    """Whether these matrices move in a subspace; not given: hidden ones do, and those that are given a rank."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(
                f"optim.groups has the pattern {self.pattern!r}, no regular expression: {error}"
            ) from error
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"optim.groups has {name} = {value} for {self.pattern!r}: it must not be negative")
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"optim.groups has rank = {self.rank} for {self.pattern!r}: it must be at least 1")
        if self.rank is not None and self.subspace is False:
            raise ConfigError(
                f"optim.groups has rank = {self.rank} and subspace = false for {self.pattern!r}: give one of them"
            )
        if (self.lr, self.weight_decay, self.rank, self.subspace) == (None,) * 4:
            raise ConfigError(
                f"optim.groups sets nothing for {self.pattern!r}: give it lr, weight_decay, rank or subspace"
            )


OptimizerName = Literal[
    "adamw", "adamw8bit", "galore", "galore_warm", "qgalore", "apollo", "apollo_mini", "fira", "ldadam", "muon"
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The optimizer and its settings. Those for matrices move the hidden ones; everything else is moved by Adam."""

    name: OptimizerName = "adamw"
    """Which optimizer; all but adamw and adamw8bit are for hidden matrices, beside which adam moves the rest."""
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
    rank: int | None = None
    """Rank of the subspace that hidden matrices move in; not given: 128, with apollo_mini 1."""
    gap: int | None = None
    """Steps between two bases of a subspace; not given: 200, with galore_warm 10."""
    lazy: bool | None = None
    """Whether the gap grows while a basis stays as it is and shrinks while it moves; not given: no."""
    carry: Literal["turn", "align", "transport", "keep"] | None = None
    """How moments follow a new basis: first turned, basis aligned, both transported, or kept; not given: turn."""
    scale: float | None = None
    """Factor of updates in a subspace; not given: 0.25 with galore, qgalore and fira, sqrt(128) with apollo_mini, 1."""
    side: Literal["right", "left", "std", "cheapest"] | None = None
    """Which side of a matrix is projected: right (columns), left (rows), std (shorter), cheapest; not given: right."""
    store: Literal["fp32", "bf16", "int8"] | None = None
    """How moments are kept, also those of parameters without a subspace; not given: fp32."""
    basis_store: Literal["fp32", "bf16", "int8", "int4"] | None = None
    """How the basis of a subspace is kept; not given: fp32."""
    start: Literal["gradient", "random"] | None = None
    """Where the first basis comes from: the first gradient, or chance until soon after; not given: gradient."""
    projection_type: Literal["std", "reverse_std", "right", "left", "full"] | None = None
    """Which side of a matrix galore projects; not given: std, the shorter one."""
    groups: tuple[GroupConfig, ...] = ()
    """Settings of their own for some parameters, by name: `[[optim.groups]]` tables."""

    def __post_init__(self) -> None:
        check_choices("optim", self)
        for name in ("lr", "embedding_lr", "head_lr", "scalar_lr", "eps", "weight_decay", "momentum_warmup", "scale"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"optim.{name} = {value} must not be negative")
        for name, value in (*(("betas", beta) for beta in self.betas), ("momentum", self.momentum)):
            if not 0 <= value < 1:
                raise ConfigError(f"optim.{name} holds {value}: it must be at least 0 and below 1")
        if self.momentum_start is not None and not 0 <= self.momentum_start < 1:
            raise ConfigError(f"optim.momentum_start = {self.momentum_start} must be at least 0 and below 1")
        for name in ("rank", "gap"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"optim.{name} = {value} must be at least 1")
        for name in sorted({name for names in LISTENS.values() for name in names} - set(LISTENS[self.name])):
            check_unused("optim", self, (name,), f"optim.name = {_either(name)}")
        if (self.momentum_start is None) != (self.momentum_warmup == 0):
            raise ConfigError("optim.momentum_start and optim.momentum_warmup go together: give both or neither")
        for group in self.groups:
            if "rank" not in LISTENS[self.name]:
                check_unused("optim.groups", group, ("rank", "subspace"), f"optim.name = {_either('rank')}")

    def listens_to(self, setting: str) -> bool:
        """Whether this optimizer has such a setting, of those that only some have."""
        return setting in LISTENS[self.name]

    def named(self, name: str) -> OptimConfig:
        """These settings, for another optimizer."""
        return build(OptimConfig, to_table(self) | {"name": name}, "optim")


LISTENS: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "adamw8bit": (),
    "galore": ("rank", "gap", "scale", "projection_type"),
    "galore_warm": ("rank", "gap", "lazy", "carry", "scale", "side", "store", "basis_store", "start"),
    "qgalore": ("rank", "gap", "scale"),
    "apollo": ("rank", "gap", "scale", "store"),
    "apollo_mini": ("rank", "gap", "scale"),
    "fira": ("rank", "gap", "scale", "store"),
    "ldadam": ("rank", "scale"),
    "muon": ("momentum", "momentum_start", "momentum_warmup"),
}
"""Settings that only some optimizers have: given to another, they would do nothing."""

PLAIN_ALONE = frozenset({"galore", "muon"})
"""Optimizers that do not move weights that are stored as codes: they would not round them by chance."""


def _either(setting: str) -> str:
    return " or ".join(name for name, listens in LISTENS.items() if setting in listens)


Shape = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run, as a factor of its peak."""

    name: Literal["constant", "linear", "cosine", "wsd", "cosine_with_restarts", "polynomial", "inverse_sqrt"] = (
        "constant"
    )
    """After the warm-up: constant; wsd holds, then falls over cooldown; the others fall at once, each in its way."""
    warmup_steps: int | float = 0
    """Steps over which the factor rises to 1, or below 1 their share of the run, rounded up."""
    warmup_start: float | None = None
    """The factor of the first step of the warm-up, which ends just before 1; not given: 1/warmup_steps, to end at 1."""
    warmup_shape: Shape | None = None
    """How the factor rises from warmup_start; not given: linear."""
    cooldown: float = 0.2
    """With wsd: the last fraction of the run over which the factor falls."""
    cooldown_steps: int | None = None
    """With wsd: the steps over which the factor falls; not given: by cooldown."""
    cooldown_shape: Shape | None = None
    """With wsd: how the factor falls; not given: linear."""
    stable_steps: int | None = None
    """With wsd: steps between warm-up and cooldown, after which floor holds; not given: such that the run ends low."""
    floor: float = 0.0
    """The factor at the end of a falling schedule."""
    cycles: float | None = None
    """With a cosine, its waves, not given: half of one; with cosine_with_restarts, its falls, not given: one."""
    power: float | None = None
    """With polynomial: the power of the share of steps left; not given: 1."""
    timescale: int | None = None
    """With inverse_sqrt: the steps after which the factor has fallen by half the more; not given: warmup_steps."""

    def __post_init__(self) -> None:
        check_choices("schedule", self)
        share = isinstance(self.warmup_steps, float)
        if self.warmup_steps < 0 or (share and self.warmup_steps >= 1):
            raise ConfigError(
                f"schedule.warmup_steps = {self.warmup_steps} must be a whole number of steps or a share below 1"
            )
        for name in ("cooldown", "floor", "warmup_start"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"schedule.{name} = {value} must be between 0 and 1")
        for name in ("cooldown_steps", "stable_steps", "cycles", "power", "timescale"):
            value = getattr(self, name)
            if value is not None and (value < 0 or (value == 0 and name == "timescale")):
                raise ConfigError(
                    f"schedule.{name} = {value} must be {'above' if name == 'timescale' else 'at least'} 0"
                )
        self._check_used()
        if self.warmup_shape is not None and self.warmup_start is None:
            raise ConfigError("schedule.warmup_shape is how the factor rises from schedule.warmup_start: give both")
        if self.stable_steps is not None and self.cooldown_steps is None:
            raise ConfigError("schedule.stable_steps is counted before schedule.cooldown_steps: give both")
        if self.name == "wsd" and self.cycles is not None and self.cooldown_shape != "cosine":
            raise ConfigError(
                "schedule.cycles counts waves of a cosine: set schedule.cooldown_shape = 'cosine' with it"
            )

    def _check_used(self) -> None:
        """Refuse what this schedule has no use for."""
        for name, owners in _OWNERS.items():
            if self.name not in owners:
                check_unused("schedule", self, (name,), f"schedule.name = {' or '.join(owners)}")
        if not self.warmup_steps:
            check_unused("schedule", self, ("warmup_start", "warmup_shape"), "schedule.warmup_steps")
        if self.cooldown_steps is not None:
            check_unused("schedule", self, ("cooldown",), "schedule.cooldown_steps not to be given")

    def named(self, name: str) -> ScheduleConfig:
        """These settings, for another schedule."""
        return build(ScheduleConfig, to_table(self) | {"name": name}, "schedule")


_OWNERS = {
    "cooldown": ("wsd",),
    "cooldown_steps": ("wsd",),
    "cooldown_shape": ("wsd",),
    "stable_steps": ("wsd",),
    "floor": ("linear", "cosine", "wsd", "cosine_with_restarts", "polynomial"),
    "cycles": ("cosine", "cosine_with_restarts", "wsd"),
    "power": ("polynomial",),
    "timescale": ("inverse_sqrt",),
}
"""Settings that only some schedules have: given to another, they would do nothing."""
