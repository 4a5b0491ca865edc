"""The optimizer section of a run config."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from whimbrel.base.errors import ConfigError
from whimbrel.config import build, check_choices, check_unused, to_table

__all__ = ["DENSE_ONLY", "OPTIONS_BY_OPTIMIZER", "GroupConfig", "OptimConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Options for the parameters whose names match a pattern."""

    pattern: str
    """Regular expression, searched for in parameter names; a parameter belongs to the first group that matches."""
    lr: float | None = None
    """Peak learning rate; default: the value for other parameters."""
    weight_decay: float | None = None
    """Decoupled weight decay; default: the value for other parameters."""
    rank: int | None = None
    """Rank of the subspace of these matrices, including embeddings and head; default: the value for other matrices."""
    subspace: bool | None = None
    """Whether these matrices are updated in a subspace; default: only hidden matrices and those with a rank."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(
                f"optim.groups: expected a regular expression, got pattern {self.pattern!r}: {error}"
            ) from error
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"optim.groups {self.pattern!r}: expected {name} >= 0, got {value}")
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"optim.groups {self.pattern!r}: expected rank >= 1, got {self.rank}")
        if self.rank is not None and self.subspace is False:
            raise ConfigError(
                f"optim.groups {self.pattern!r}: rank = {self.rank} contradicts subspace = false: remove one of them"
            )
        if (self.lr, self.weight_decay, self.rank, self.subspace) == (None,) * 4:
            raise ConfigError(
                f"optim.groups {self.pattern!r}: no options given: set lr, weight_decay, rank or subspace"
            )


OptimizerName = Literal[
    "adamw", "adamw8bit", "galore", "galore_warm", "qgalore", "apollo", "apollo_mini", "fira", "ldadam", "muon"
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The optimizer and its options. Matrix optimizers update hidden matrices; AdamW updates the rest."""

    name: OptimizerName = "adamw"
    """Optimizer; all except adamw and adamw8bit apply to hidden matrices and use AdamW for other parameters."""
    lr: float = 3e-4
    """Peak learning rate; with muon, of the hidden matrices."""
    embedding_lr: float | None = None
    """Peak learning rate of the embeddings; default: lr."""
    head_lr: float | None = None
    """Peak learning rate of an untied head; default: lr."""
    scalar_lr: float | None = None
    """Peak learning rate of norms, biases and other parameters of fewer than two dimensions; default: lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's first and second moment."""
    eps: float = 1e-8
    """Adam's eps."""
    weight_decay: float = 0.01
    """Decoupled weight decay, multiplied by the learning rate."""
    decay_params: Literal["all", "matrices", "hidden"] = "matrices"
    """Parameters with weight decay: all, those of two or more dimensions, or only hidden matrices."""
    momentum: float = 0.95
    """Muon's momentum."""
    momentum_start: float | None = None
    """Muon's momentum at the first step, increasing to momentum over momentum_warmup steps; default: momentum."""
    momentum_warmup: int = 0
    """Steps over which Muon's momentum increases."""
    rank: int | None = None
    """Rank of the subspace of hidden matrices; default: 128, with apollo_mini 1."""
    gap: int | None = None
    """Steps between basis refreshes; default: 200, with galore_warm 10."""
    lazy: bool | None = None
    """Whether the gap grows while a basis hardly changes and shrinks while it does; default: false."""
    moment_transfer: Literal["first", "both", "align", "keep"] | None = None
    """Moments after a basis change: project first or both, align the basis, or keep them unchanged; default: first."""
    scale: float | None = None
    """Scale of low-rank updates; default: 0.25 with galore, qgalore, fira; sqrt(128) with apollo_mini; else 1."""
    side: Literal["right", "left", "std", "cheapest"] | None = None
    """Projected side of a matrix: right (columns), left (rows), std (shorter), cheapest; default: right."""
    store: Literal["fp32", "bf16", "int8"] | None = None
    """Storage of moments, also of parameters without a subspace; default: fp32."""
    basis_store: Literal["fp32", "bf16", "int8", "int4"] | None = None
    """Storage of the basis of a subspace; default: fp32."""
    start: Literal["gradient", "random"] | None = None
    """First basis: from the first gradient, or random and replaced within the first steps; default: gradient."""
    projection_type: Literal["std", "reverse_std", "right", "left", "full"] | None = None
    """Projected side of a matrix with galore; default: std, the shorter one."""
    groups: tuple[GroupConfig, ...] = ()
    """Options for some parameters, by name: `[[optim.groups]]` tables."""

    def __post_init__(self) -> None:
        check_choices("optim", self)
        for name in ("lr", "embedding_lr", "head_lr", "scalar_lr", "eps", "weight_decay", "momentum_warmup", "scale"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"optim.{name}: expected a number >= 0, got {value}")
        for name, value in (
            *(("betas", beta) for beta in self.betas), ("momentum", self.momentum),
            ("momentum_start", self.momentum_start),
        ):  # fmt: skip
            if value is not None and not 0 <= value < 1:
                raise ConfigError(f"optim.{name}: expected numbers in [0, 1), got {value}")
        for name in ("rank", "gap"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"optim.{name}: expected an integer >= 1, got {value}")
        special = {option for options in OPTIONS_BY_OPTIMIZER.values() for option in options}
        for name in sorted(special - set(OPTIONS_BY_OPTIMIZER[self.name])):
            check_unused("optim", self, (name,), f"optim.name = {_optimizers_with(name)}")
        if (self.momentum_start is None) != (self.momentum_warmup == 0):
            raise ConfigError("optim.momentum_start and optim.momentum_warmup require each other: set both or neither")
        for group in self.groups:
            if not self.has_option("rank"):
                check_unused("optim.groups", group, ("rank", "subspace"), f"optim.name = {_optimizers_with('rank')}")

    def has_option(self, option: str) -> bool:
        """Whether this optimizer accepts `option`, one of those that only some optimizers have."""
        return option in OPTIONS_BY_OPTIMIZER[self.name]

    def with_name(self, name: str) -> OptimConfig:
        """The same options for another optimizer."""
        return build(OptimConfig, to_table(self) | {"name": name}, "optim")


OPTIONS_BY_OPTIMIZER: dict[str, tuple[str, ...]] = {
    "adamw": (),
    "adamw8bit": (),
    "galore": ("rank", "gap", "scale", "projection_type"),
    "galore_warm": ("rank", "gap", "lazy", "moment_transfer", "scale", "side", "store", "basis_store", "start"),
    "qgalore": ("rank", "gap", "scale"),
    "apollo": ("rank", "gap", "scale", "store"),
    "apollo_mini": ("rank", "gap", "scale"),
    "fira": ("rank", "gap", "scale", "store"),
    "ldadam": ("rank", "scale"),
    "muon": ("momentum", "momentum_start", "momentum_warmup"),
}
"""Options accepted by only some optimizers; rejected for others, where they would have no effect."""

DENSE_ONLY = frozenset({"galore", "muon"})
"""Optimizers that cannot update quantized weights: they have no stochastic rounding."""


def _optimizers_with(option: str) -> str:
    return " or ".join(name for name, options in OPTIONS_BY_OPTIMIZER.items() if option in options)
