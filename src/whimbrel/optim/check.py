"""What a group of parameters may say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from whimbrel.base.errors import OptimizerError
from whimbrel.config import nearest
from whimbrel.optim.lift import LIFTS
from whimbrel.optim.rules import RULES
from whimbrel.optim.store import codec

__all__ = ["check_group", "check_keys", "check_numbers"]

ALSO = ("params", "names", "param_names", "peak_lr", "initial_lr", "splits")
"""Keys that schedules and the trainer put into groups."""
CHOICES = {
    "subspace": ("svd", "warm", "random"),
    "rule": tuple(RULES),
    "lift": LIFTS,
    "side": ("right", "left", "std", "cheapest"),
    "carry": ("keep", "transport"),
    "start": ("gradient", "random"),
}


def check_keys(optimizer: str, group: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse keys of a group that nobody would read, with the nearest that somebody does."""
    for key in group:
        if key not in known and key not in ALSO:
            raise OptimizerError(f"a group has {key!r}, which {optimizer} does not know{nearest(key, known)}")


def check_numbers(group: Mapping[str, Any]) -> None:
    """Refuse numbers out of range, of those that a group has."""
    for name in ("lr", "weight_decay", "eps", "scale", "seed"):
        value = group.get(name)
        if value is not None and not value >= 0:
            raise OptimizerError(f"{name} = {value} must be at least 0")
    for name in ("betas", "momentum"):
        value = group.get(name)
        values = value if isinstance(value, tuple | list) else (value,)
        if name == "betas" and value is not None and len(values) != 2:
            raise OptimizerError(f"betas = {value} must be two numbers")
        if any(beta is not None and not 0 <= beta < 1 for beta in values):
            raise OptimizerError(f"{name} = {value} must be at least 0 and below 1")
    for name in ("rank", "gap", "update_proj_gap"):
        value = group.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise OptimizerError(f"{name} = {value} must be a whole number of at least 1")


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse settings of a composed group that cannot be, or that its choices would not listen to."""
    check_numbers(group)
    for name, allowed in CHOICES.items():
        if group[name] not in allowed:
            raise OptimizerError(f"{name} = {group[name]!r} is not one of {', '.join(allowed)}")
    codec(group["store"], "signed")
    codec(group["basis_store"], "basis")
    rule = RULES[group["rule"]]
    for name in ("betas", "eps", "momentum"):
        if group[name] is not None and name not in rule.defaults:
            raise OptimizerError(f"{name} = {group[name]} means nothing to rule = {group['rule']!r}: leave it out")
    if group["carry"] == "transport" and (rule.linear is None or group["subspace"] == "random"):
        raise OptimizerError(
            f"carry = 'transport' needs a basis that is kept and a rule with a mean of gradients, not subspace = "
            f"{group['subspace']!r} with rule = {group['rule']!r}: use carry = 'keep'"
        )
    if group["error_feedback"] and (group["lift"] != "back" or group["subspace"] == "random"):
        raise OptimizerError(
            "error_feedback keeps what a basis leaves out: it needs lift = 'back' and subspace = 'warm' or 'svd'"
        )
    if group["lazy"] and group["subspace"] == "random":
        raise OptimizerError(
            "lazy = True compares one basis with the next, and a random one resembles none: leave it out"
        )
    if group["lift"] == "fira" and group["subspace"] == "random":
        raise OptimizerError(
            "lift = 'fira' splits the gradient by an orthonormal basis: use subspace = 'warm' or 'svd'"
        )
