"""Build an optimizer from a model and a config: parameter roles and groups; restore saved state by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from whimbrel.base.errors import ConfigError, OptimizerError
from whimbrel.optim.config import DENSE_ONLY, OPTIONS_BY_OPTIMIZER, GroupConfig, OptimConfig
from whimbrel.optim.galore import GaLore, matrix_shape
from whimbrel.optim.lowrank import LowRankOptimizer
from whimbrel.optim.muon import Muon
from whimbrel.optim.presets import AdamW8bit, Apollo, ApolloMini, Fira, GaLoreWarm, LDAdam, QGaLore
from whimbrel.optim.store import QuantizedParameter

__all__ = ["ParameterInfo", "Role", "build_optimizer", "classify_parameters", "restore_optimizer"]

logger = logging.getLogger(__name__)
DEFAULT_RANK = 128
"""Default rank of the low-rank presets."""

STATE_OPTIONS = (
    "rule", "rank", "subspace", "back_projection", "store", "basis_store", "side", "error_feedback", "projection_type",
)  # fmt: skip
"""Group options that define the meaning of the state: a saved state is valid only with the same values."""

Role = Literal["hidden", "embedding", "head", "scalar"]
"""hidden: a matrix of a block; embedding; head: an untied output projection; scalar: fewer than two dimensions."""


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """A parameter, its role in the model and, if it is fused (q, k, v), the number of rows of each part."""

    name: str
    parameter: nn.Parameter
    role: Role
    splits: tuple[int, ...] = ()


def classify_parameters(model: nn.Module, splits: Mapping[str, tuple[int, ...]] | None = None) -> list[ParameterInfo]:
    """Each trainable parameter of any model, once, with its role; `splits` by name, for fused matrices.

    The head is the module called lm_head, or `get_output_embeddings()` of a Hugging Face model; a head tied to the
    embedding counts as the embedding.
    """
    splits = splits or {}
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    get_head = getattr(model, "get_output_embeddings", None)
    head = getattr(model, "lm_head", None) if get_head is None else get_head()
    heads = {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()

    def role(parameter: nn.Parameter) -> Role:
        if parameter.ndim < 2:
            return "scalar"
        if id(parameter) in tables:
            return "embedding"
        return "head" if id(parameter) in heads else "hidden"

    classified = [
        ParameterInfo(name, parameter, role(parameter), splits.get(name, ()))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    if not classified:
        raise OptimizerError(f"{type(model).__name__} has no trainable parameters: set requires_grad on some")
    return classified


def build_optimizer(config: OptimConfig, parameters: Sequence[ParameterInfo], *, seed: int = 0) -> Optimizer:
    """The optimizer over `parameters`, with one group per combination of learning rate, decay and rule.

    Hidden matrices are updated by the named optimizer; embeddings, head, norms and biases by AdamW. Fused matrices (q,
    k, v) stay fused in a subspace: they share their input, which is the side that is projected by default, and each
    row has its own moments. Each group has its `peak_lr` and the `names` of its parameters. `seed` is for random bases
    and stochastic rounding.
    """
    _check_patterns(config, parameters)
    _check_quantized(config, parameters)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for item in parameters:
        options = _group_options(config, item)
        group = groups.setdefault(tuple(options.items()), {"params": [], "names": [], **options})
        group["params"].append(item.parameter)
        group["names"].append(item.name)
        if config.name == "muon":
            group.setdefault("splits", []).append(item.splits)
    _warn_of_full_rank(config, groups.values())
    make = OPTIMIZERS[config.name]
    given = {name: getattr(config, name) for name in ("lr", "betas", "eps", *OPTIONS_BY_OPTIMIZER[config.name])}
    if isinstance(make, type) and issubclass(make, LowRankOptimizer):
        given["seed"] = seed % 2**32
    return make(list(groups.values()), **{name: value for name, value in given.items() if value is not None})


def _adamw(params: Iterable[dict[str, Any]], **options: Any) -> Optimizer:
    groups = list(params)
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(p.is_cuda and not isinstance(p, QuantizedParameter) for p in parameters)
    return torch.optim.AdamW(groups, fused=fused or None, **options)


def _galore(params: Iterable[dict[str, Any]], *, rank: int = DEFAULT_RANK, gap: int = 200, **options: Any) -> Optimizer:
    return GaLore(params, rank=rank, update_proj_gap=gap, **options)


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
"""The constructor of each `optim.name`."""


def _group_options(config: OptimConfig, item: ParameterInfo) -> dict[str, Any]:
    """The options of the parameter group that `item` belongs to."""
    group = next((group for group in config.groups if re.search(group.pattern, item.name)), None)
    role_lr = {"hidden": None, "embedding": config.embedding_lr, "head": config.head_lr, "scalar": config.scalar_lr}[
        item.role
    ]
    lr = config.lr if role_lr is None else role_lr
    lr = lr if group is None or group.lr is None else group.lr
    decays = {"all": True, "matrices": item.parameter.ndim >= 2, "hidden": item.role == "hidden"}[config.decay_params]
    decay = config.weight_decay if decays else 0.0
    decay = decay if group is None or group.weight_decay is None else group.weight_decay
    options: dict[str, Any] = {"lr": lr, "peak_lr": lr, "weight_decay": decay}
    if config.name == "muon":
        options["rule"] = "muon" if item.role == "hidden" and item.parameter.ndim == 2 else "adam"
    if config.has_option("rank"):
        options |= _rank(item, group)
    return options


def _rank(item: ParameterInfo, group: GroupConfig | None) -> dict[str, int | None]:
    """The `rank` option of a parameter: a number, None for no subspace, or absent for the optimizer's default."""
    if item.parameter.ndim < 2:
        return {"rank": None}
    if group is not None and group.rank is not None:
        return {"rank": group.rank}
    subspace = None if group is None else group.subspace
    return {} if (item.role == "hidden" if subspace is None else subspace) else {"rank": None}


def _check_patterns(config: OptimConfig, parameters: Sequence[ParameterInfo]) -> None:
    """Raise if a group matches no parameter, or sets a subspace but matches only vectors."""
    for group in config.groups:
        found = [item.parameter for item in parameters if re.search(group.pattern, item.name)]
        if not found:
            raise ConfigError(f"optim.groups {group.pattern!r}: no parameter name matches this pattern: correct it")
        if (group.rank is not None or group.subspace is not None) and all(parameter.ndim < 2 for parameter in found):
            raise ConfigError(
                f"optim.groups {group.pattern!r}: rank and subspace apply to matrices, and only vectors match this "
                "pattern: correct it"
            )


def _check_quantized(config: OptimConfig, parameters: Iterable[ParameterInfo]) -> None:
    """Raise if the optimizer cannot update quantized weights and there are some."""
    quantized = next((item.name for item in parameters if isinstance(item.parameter, QuantizedParameter)), None)
    if quantized is not None and config.name in DENSE_ONLY:
        others = ", ".join(name for name in OPTIMIZERS if name not in DENSE_ONLY)
        raise OptimizerError(
            f"optim.name = {config.name}: expected unquantized weights, got a quantized {quantized}: use one of "
            f"{others}, or unquantized weights"
        )


def _warn_of_full_rank(config: OptimConfig, groups: Iterable[dict[str, Any]]) -> None:
    if not config.has_option("rank") or config.name == "apollo_mini":
        return
    for group in groups:
        rank = group.get("rank", config.rank or DEFAULT_RANK)
        matrices = [p for p in group["params"] if rank is not None and p.ndim >= 2]
        full = [p for p in matrices if min(matrix_shape(p.shape)[-2:]) <= rank]
        if full:
            logger.warning(
                "rank %d is the full rank of %d parameters, for example of shape %s: a subspace saves nothing there, "
                "use a smaller optim.rank", rank, len(full), tuple(full[0].shape),
            )  # fmt: skip


def restore_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load saved state by parameter name; groups and options of `optimizer` do not change.

    Raises `OptimizerError` if the state was saved for other parameters or with incompatible options.
    """
    own = optimizer.state_dict()
    mine, theirs = (_by_name(groups) for groups in (own["param_groups"], saved["param_groups"]))
    if mine.keys() != theirs.keys():
        odd = sorted(mine.keys() ^ theirs.keys())
        raise OptimizerError(f"the saved state is of other parameters: only one side has {odd[0]}")
    for name, (_, group) in mine.items():
        _check_state_options(name, group, theirs[name][1])
    states = {index: saved["state"].get(theirs[name][0]) for name, (index, _) in mine.items()}
    own["state"] = {index: state for index, state in states.items() if state is not None}
    own |= {name: value for name, value in saved.items() if name == "skipped"}
    optimizer.load_state_dict(own)


def _by_name(groups: list[dict[str, Any]]) -> dict[str, tuple[int, dict[str, Any]]]:
    """The index and group of each parameter by name; by index if the optimizer has no names."""
    return {
        name: (index, group)
        for group in groups
        for name, index in zip(group.get("names", group["params"]), group["params"], strict=True)
    }


def _check_state_options(name: str, own: dict[str, Any], saved: dict[str, Any]) -> None:
    if own.keys() != saved.keys():
        raise OptimizerError(
            "the saved state is of another kind of optimizer: use the optimizer that the run started with"
        )
    for option in STATE_OPTIONS:
        if own.get(option) != saved.get(option):
            raise OptimizerError(f"saved state of {name}: expected {option} = {own[option]!r}, got {saved[option]!r}")
