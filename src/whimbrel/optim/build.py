"""From a configuration and routed parameters to an optimizer.

The rule for matrices moves the hidden ones; embeddings, a head, norms and biases are moved by Adam, whatever a name
stands for. Fused matrices (q, k, v) stay fused in a subspace: what is projected away by default is their input, which
they share, and each row has moments of its own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from whimbrel.base.errors import ConfigError, OptimizerError
from whimbrel.ops import kernels_of
from whimbrel.optim.composed import Composed
from whimbrel.optim.config import LISTENS, PLAIN_ALONE, GroupConfig, OptimConfig
from whimbrel.optim.galore import GaLore
from whimbrel.optim.muon import Muon
from whimbrel.optim.presets import AdamW8bit, Apollo, ApolloMini, Fira, GaLoreWarm, LDAdam, QGaLore
from whimbrel.optim.projector import matrix_shape
from whimbrel.optim.routing import RoutedParameter
from whimbrel.optim.store import CodedWeight

__all__ = ["build_optimizer", "restore_optimizer"]

logger = logging.getLogger(__name__)
DEFAULT_RANK = 128
"""Of the presets."""

MEANING = ("rule", "rank", "subspace", "lift", "store", "basis_store", "side", "error_feedback", "projection_type")
"""Settings of a group that say what its state means; with others than when it was saved, it would mean nothing."""


def build_optimizer(config: OptimConfig, parameters: Sequence[RoutedParameter], *, seed: int = 0) -> Optimizer:
    """The optimizer over `parameters`, one group for each learning rate, decay and rule; `peak_lr` in each group.

    `seed` is for what an optimizer draws: random bases, and roundings by chance.
    """
    _check_patterns(config, parameters)
    _check_codes(config, parameters)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for item in parameters:
        settings = _settings(config, item)
        group = groups.setdefault(tuple(settings.items()), {"params": [], "names": [], **settings})
        group["params"].append(item.parameter)
        group["names"].append(item.name)
        if config.name == "muon":
            group.setdefault("splits", []).append(item.splits)
    _warn_of_full_ranks(config, groups.values())
    make = OPTIMIZERS[config.name]
    given = {name: getattr(config, name) for name in ("lr", "betas", "eps", *LISTENS[config.name])}
    if isinstance(make, type) and issubclass(make, Composed):
        given["seed"] = seed % 2**32
    return make(list(groups.values()), **{name: value for name, value in given.items() if value is not None})


def _check_codes(config: OptimConfig, parameters: Iterable[RoutedParameter]) -> None:
    """Refuse to move weights that are stored as codes by what would not round them by chance."""
    coded = next((item.name for item in parameters if isinstance(item.parameter, CodedWeight)), None)
    if coded is not None and config.name in PLAIN_ALONE:
        others = ", ".join(name for name in OPTIMIZERS if name not in PLAIN_ALONE)
        raise OptimizerError(
            f"{config.name} moves plain weights, and {coded} is stored as codes: use one of {others}, or train plain "
            "weights"
        )


def _warn_of_full_ranks(config: OptimConfig, groups: Iterable[dict[str, Any]]) -> None:
    """Say where a subspace is the whole space, and saves nothing."""
    if "rank" not in LISTENS[config.name] or config.name == "apollo_mini":
        return
    for group in groups:
        rank = group.get("rank", config.rank or DEFAULT_RANK)
        matrices = [p for p in group["params"] if rank is not None and p.ndim >= 2]
        full = [p for p in matrices if min(matrix_shape(p.shape)[-2:]) <= rank]
        if full:
            logger.warning(
                "rank %d is the full rank of %d parameters, one of shape %s: a subspace saves nothing there, so give a "
                "smaller optim.rank", rank, len(full), tuple(full[0].shape),
            )  # fmt: skip


def _adamw(params: Iterable[dict[str, Any]], **settings: Any) -> Optimizer:
    groups = list(params)
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(kernels_of(p) == "cuda" and not isinstance(p, CodedWeight) for p in parameters)
    return torch.optim.AdamW(groups, fused=fused or None, **settings)


def _galore(
    params: Iterable[dict[str, Any]], *, rank: int = DEFAULT_RANK, gap: int = 200, **settings: Any
) -> Optimizer:
    return GaLore(params, rank=rank, update_proj_gap=gap, **settings)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": _adamw,
    "adamw8bit": AdamW8bit,
    "galore": _galore,
    "galore_warm": GaLoreWarm,
    "qgalore": QGaLore,
    "apollo": Apollo,
    "apollo_mini": ApolloMini,
    "fira": Fira,
    "ldadam": LDAdam,
    "muon": Muon,
}
"""What each `optim.name` is."""


def restore_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Take over saved moments by parameter name, and keep this optimizer's own groups and settings.

    The moments of other parameters, or of an optimizer in which they mean something else, are refused.
    """
    own = optimizer.state_dict()
    mine, theirs = (_by_name(groups) for groups in (own["param_groups"], saved["param_groups"]))
    if mine.keys() != theirs.keys():
        odd = sorted(mine.keys() ^ theirs.keys())
        raise OptimizerError(f"the saved state is of other parameters: {odd[0]} is on one side only")
    for name, (_, group) in mine.items():
        _check_meaning(name, group, theirs[name][1])
    moments = {index: saved["state"].get(theirs[name][0]) for name, (index, _) in mine.items()}
    own["state"] = {index: state for index, state in moments.items() if state is not None}
    own |= {name: value for name, value in saved.items() if name == "skipped"}
    optimizer.load_state_dict(own)


def _by_name(groups: list[dict[str, Any]]) -> dict[str, tuple[int, dict[str, Any]]]:
    """Each parameter's index, and its group; those of an optimizer that knows no names have none."""
    return {
        name: (index, group)
        for group in groups
        for name, index in zip(group.get("names", group["params"]), group["params"], strict=True)
    }


def _check_meaning(name: str, own: dict[str, Any], saved: dict[str, Any]) -> None:
    """Refuse a state whose numbers mean something else here."""
    if own.keys() != saved.keys():
        raise OptimizerError("the saved state is of another kind of optimizer")
    for setting in MEANING:
        if own.get(setting) != saved.get(setting):
            raise OptimizerError(
                f"the saved state of {name} is of {setting} = {saved[setting]!r}, and now it is {own[setting]!r}"
            )


def _check_patterns(config: OptimConfig, parameters: Sequence[RoutedParameter]) -> None:
    """Refuse groups that no parameter falls under, or none that could listen to what they say."""
    for own in config.groups:
        found = [item.parameter for item in parameters if re.search(own.pattern, item.name)]
        if not found:
            raise ConfigError(
                f"optim.groups has the pattern {own.pattern!r}, which is in no parameter's name: correct it"
            )
        if (own.rank is not None or own.subspace is not None) and all(parameter.ndim < 2 for parameter in found):
            raise ConfigError(
                f"optim.groups speaks of a subspace for {own.pattern!r}, and all such parameters are vectors, which "
                "have none: correct the pattern"
            )


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
    if "rank" in LISTENS[config.name]:
        settings |= _rank(item, group)
    return settings


def _rank(item: RoutedParameter, group: GroupConfig | None) -> dict[str, int | None]:
    """The rank of a parameter's subspace: its own, none, or nothing said, which leaves it to the optimizer."""
    if item.parameter.ndim < 2:
        return {"rank": None}
    if group is not None and group.rank is not None:
        return {"rank": group.rank}
    asked = None if group is None else group.subspace
    return {} if (item.role == "hidden" if asked is None else asked) else {"rank": None}
