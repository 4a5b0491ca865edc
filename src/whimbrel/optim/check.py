"""What a group of parameters may say."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from whimbrel.base.errors import OptimizerError
from whimbrel.config import did_you_mean
from whimbrel.optim.lift import LIFTS
from whimbrel.optim.rules import RULES
from whimbrel.optim.store import codec

__all__ = ["check_alike", "check_fits", "check_group", "check_keys", "check_numbers", "check_whole", "lr_of"]

ALSO = ("params", "names", "param_names", "peak_lr", "initial_lr", "splits")
"""Keys that schedules and the trainer put into groups."""
TENSOR_FREE = (
    "weight_decay", "betas", "eps", "momentum", "momentum_start", "momentum_warmup", "scale", "rank", "gap",
    "update_proj_gap", "seed",
)  # fmt: skip
"""Settings that may not be tensors. A tensor `lr`, as torch's schedulers fill it, is read once in each step."""
MAY_LACK = ("rank", "betas", "eps", "momentum")
"""Settings that may be None: no subspace, or what the rule has by itself."""
CHOICES = {
    "subspace": ("svd", "warm", "random"),
    "rule": tuple(RULES),
    "lift": LIFTS,
    "side": ("right", "left", "std", "cheapest"),
    "carry": ("align", "turn", "transport", "keep"),
    "start": ("gradient", "random"),
}


def check_keys(optimizer: str, group: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse keys of a group that nobody would read, with the nearest that somebody does."""
    for key in group:
        if key not in known and key not in ALSO:
            raise OptimizerError(f"a group has {key!r}, which {optimizer} does not know{did_you_mean(key, known)}")


def check_numbers(group: Mapping[str, Any]) -> None:
    """Refuse numbers out of range, of those that a group has."""
    given = {name: value for name, value in group.items() if value is not None or name not in MAY_LACK}
    for name in TENSOR_FREE:
        value = given.get(name)
        if isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value)):
            raise OptimizerError(f"{name} must be a Python number, got a tensor: only lr may be one, use .item()")
    if isinstance(given.get("lr"), Tensor) and given["lr"].numel() != 1:
        raise OptimizerError(f"lr must be a number or a tensor of one element, got shape {tuple(given['lr'].shape)}")
    for name in ("lr", "weight_decay", "eps", "scale"):
        if name in given and not _is_number(given[name], math.inf):
            raise OptimizerError(f"{name} = {given[name]!r} must be a number of at least 0")
    betas = given.get("betas", (0, 0))
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(_is_number(beta, 1) for beta in betas):
        raise OptimizerError(f"betas = {betas!r} must be two numbers, each at least 0 and below 1")
    for name in ("momentum", "momentum_start"):
        if not _is_number(given.get(name, 0), 1):
            raise OptimizerError(f"{name} = {given[name]!r} must be at least 0 and below 1")
    for name, least in (("rank", 1), ("gap", 1), ("update_proj_gap", 1), ("seed", 0)):
        check_whole(name, given.get(name, least), least)


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number, or too small a one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptimizerError(f"{name} = {value!r} must be a whole number of at least {least}")


def lr_of(group: Mapping[str, Any]) -> float:
    """The learning rate of a group as a number. A tensor is read, not computed with: it belongs to the caller."""
    lr = group["lr"]
    return lr.item() if isinstance(lr, Tensor) else lr


def _is_number(value: Any, end: float) -> bool:
    return isinstance(value, Real | Tensor) and 0 <= float(value) < end


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse settings of a composed group that cannot be, or that its choices would not listen to."""
    check_numbers(group)
    for name, allowed in CHOICES.items():
        if group[name] not in allowed:
            raise OptimizerError(f"{name} = {group[name]!r} is not one of {', '.join(allowed)}")
    for name in ("lazy", "error_feedback", "maximize", "foreach"):
        if not isinstance(group[name], bool):
            raise OptimizerError(f"{name} = {group[name]!r} must be True or False")
    codec(group["store"], "signed")
    codec(group["basis_store"], "basis")
    rule = RULES[group["rule"]]
    for name in ("betas", "eps", "momentum"):
        if group[name] is not None and name not in rule.defaults:
            raise OptimizerError(f"{name} = {group[name]} means nothing to rule = {group['rule']!r}: leave it out")
    _check_together(group, linear=rule.linear is not None)


def _check_together(group: Mapping[str, Any], *, linear: bool) -> None:
    """Refuse choices that do not go together; `linear` says whether the rule has a mean of gradients."""
    if group["carry"] == "align" and group["subspace"] != "warm":
        raise OptimizerError(
            f"carry = 'align' turns a warm basis, and subspace = {group['subspace']!r}: use 'transport' or 'keep'"
        )
    if group["carry"] in ("transport", "turn") and (not linear or group["subspace"] == "random"):
        raise OptimizerError(
            f"carry = {group['carry']!r} needs a basis that is kept and a rule with a mean of gradients, not "
            f"subspace = {group['subspace']!r} with rule = {group['rule']!r}: use carry = 'keep'"
        )
    if group["error_feedback"] and (group["lift"] != "back" or group["subspace"] == "random"):
        raise OptimizerError(
            "error_feedback keeps what a basis leaves out: it needs lift = 'back' and subspace = 'warm' or 'svd'"
        )
    for name, default in (("basis_store", "fp32"), ("start", "gradient")):
        if group["subspace"] == "random" and group[name] != default:
            raise OptimizerError(f"{name} = {group[name]!r} means nothing to a basis that is drawn and kept nowhere")
    if group["lazy"] and group["subspace"] == "random":
        raise OptimizerError(
            "lazy = True compares one basis with the next, and a random one resembles none: leave it out"
        )
    if group["lift"] == "fira" and group["subspace"] == "random":
        raise OptimizerError(
            "lift = 'fira' splits the gradient by an orthonormal basis: use subspace = 'warm' or 'svd'"
        )


def check_alike(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse the state of a group whose numbers mean something else here, though their shapes may agree."""
    for name in ("rule", "side", "rank"):
        if own[name] != saved.get(name):
            saying = f"has {name} = {saved[name]!r}, this one {own[name]!r}" if name in saved else f"has no {name}"
            raise OptimizerError(f"the saved state is of another optimizer, which {saying}: build it as it was saved")


def check_fits(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str) -> None:
    """Refuse a saved state of another shape, or of other choices."""
    mine, theirs = ({n: (tuple(t.shape), t.dtype) for n, t in state.items()} for state in (own, saved))
    if mine != theirs:
        wrong = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        raise OptimizerError(
            f"the saved state of a parameter ({what}) differs in {', '.join(wrong)}: keep rank, rule, store and side "
            "as they were, or start with a fresh state"
        )
