"""From a configuration and routed parameters to an optimizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from whimbrel.base.errors import ConfigError
from whimbrel.optim.config import OptimConfig
from whimbrel.optim.muon import Muon
from whimbrel.optim.routing import RoutedParameter

__all__ = ["build_optimizer", "restore_optimizer"]


def build_optimizer(config: OptimConfig, parameters: Sequence[RoutedParameter]) -> torch.optim.Optimizer:
    """The optimizer over `parameters`, one group for each learning rate, decay and rule; `peak_lr` in each group."""
    for own in config.groups:
        if not any(re.search(own.pattern, item.name) for item in parameters):
            raise ConfigError(
                f"optim.groups has the pattern {own.pattern!r}, which is in no parameter's name: correct it"
            )
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for item in parameters:
        settings = _settings(config, item)
        group = groups.setdefault(tuple(settings.items()), {"params": [], "names": [], **settings})
        group["params"].append(item.parameter)
        group["names"].append(item.name)
        if config.name == "muon":
            group.setdefault("splits", []).append(item.splits)
    if config.name == "muon":
        return Muon(list(groups.values()), betas=config.betas, eps=config.eps)
    fused = all(item.parameter.device.type == "cuda" for item in parameters)
    return torch.optim.AdamW(
        list(groups.values()), lr=config.lr, betas=config.betas, eps=config.eps, fused=fused or None
    )


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> bool:
    """Take over saved moments by parameter name, and keep this optimizer's own groups and settings.

    False where the moments are those of other parameters, or of another rule.
    """
    own = optimizer.state_dict()
    mine, theirs = (_by_name(groups) for groups in (own["param_groups"], saved["param_groups"]))
    if {name: kind for name, (_, kind) in mine.items()} != {name: kind for name, (_, kind) in theirs.items()}:
        return False
    moments = {index: saved["state"].get(theirs[name][0]) for name, (index, _) in mine.items()}
    own["state"] = {index: state for index, state in moments.items() if state is not None}
    optimizer.load_state_dict(own)
    return True


def _by_name(groups: list[dict[str, Any]]) -> dict[str, tuple[int, tuple[Any, ...]]]:
    """Each parameter's index, and what must agree for its moments to mean the same: the kinds of settings, the rule."""
    return {
        name: (index, (frozenset(group), group.get("rule")))
        for group in groups
        for name, index in zip(group["names"], group["params"], strict=True)
    }


def _settings(config: OptimConfig, item: RoutedParameter) -> dict[str, Any]:
    """The group settings that `item` falls under."""
    group = next((own for own in config.groups if re.search(own.pattern, item.name)), None)
    own = {"hidden": None, "embedding": config.embedding_lr, "head": config.head_lr, "scalar": config.scalar_lr}[
        item.role
    ]
    lr = config.lr if own is None else own
    lr = lr if group is None or group.lr is None else group.lr
    decays = {"all": True, "matrices": item.parameter.ndim >= 2, "hidden": item.role == "hidden"}[config.decay]
    decay = config.weight_decay if decays else 0.0
    decay = decay if group is None or group.weight_decay is None else group.weight_decay
    settings: dict[str, Any] = {"lr": lr, "peak_lr": lr, "weight_decay": decay}
    if config.name == "muon":
        settings["rule"] = "muon" if item.role == "hidden" and item.parameter.ndim == 2 else "adam"
        settings["momentum"] = config.momentum
        settings["momentum_start"] = config.momentum if config.momentum_start is None else config.momentum_start
        settings["momentum_warmup"] = config.momentum_warmup
    return settings
