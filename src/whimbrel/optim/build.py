"""Build an optimizer from a model and a config: settings, parameter roles and groups, saved state, memory."""

from __future__ import annotations

import copy
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from whimbrel.base.errors import ConfigError, OptimizerError
from whimbrel.config import build, check_choices, check_unused, to_table
from whimbrel.distributed.state import to_local
from whimbrel.optim.backward import OptimizerInBackward
from whimbrel.optim.base import BaseOptimizer
from whimbrel.optim.galore import GaLore, matrix_shape
from whimbrel.optim.lowrank import AdamW8bit, Apollo, ApolloMini, Fira, GaLoreWarm, LDAdam, LowRankOptimizer, QGaLore
from whimbrel.optim.muon import Muon
from whimbrel.optim.param_state import QuantizedParameter

__all__ = [
    "DENSE_ONLY",
    "OPTIMIZERS",
    "OPTIONS_BY_OPTIMIZER",
    "GroupConfig",
    "OptimConfig",
    "ParameterInfo",
    "ParameterRow",
    "Role",
    "build_optimizer",
    "classify_parameters",
    "parameter_table",
    "restore_optimizer",
    "state_bytes",
]

logger = logging.getLogger(__name__)
DEFAULT_RANK = 128
"""Default rank of the low-rank presets."""

STATE_OPTIONS = (
    "rule", "rank", "subspace", "back_projection", "store", "basis_store", "side", "error_feedback", "projection_type",
)  # fmt: skip
"""Group options that define the meaning of the state: a saved state is valid only with the same values."""


# Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Options for the parameters whose names match a pattern."""

    pattern: str
    """Regular expression to search for in parameter names; a parameter belongs to the first group that matches."""
    lr: float | None = None
    """Peak learning rate; default: the value for other parameters."""
    weight_decay: float | None = None
    """Decoupled weight decay; default: the value for other parameters."""
    rank: int | None = None
    """Rank of the subspace of these matrices, which may be embeddings or the head; default: the value for other
    matrices."""
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
                f"optim.groups {self.pattern!r}: rank = {self.rank} conflicts with subspace = false: remove one of them"
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
    """Peak learning rate; with muon, that of the hidden matrices."""
    embedding_lr: float | None = None
    """Peak learning rate of the embeddings; default: lr."""
    head_lr: float | None = None
    """Peak learning rate of an untied head; default: lr."""
    scalar_lr: float | None = None
    """Peak learning rate of norms, biases and other parameters with fewer than two dimensions; default: lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's first and second moments."""
    eps: float = 1e-8
    """Adam's eps."""
    weight_decay: float = 0.01
    """Decoupled weight decay, which is multiplied by the learning rate."""
    decay_params: Literal["all", "matrices", "hidden"] = "matrices"
    """Parameters that weight decay applies to: all, those with two or more dimensions, or only hidden matrices."""
    momentum: float = 0.95
    """Muon's momentum."""
    momentum_start: float | None = None
    """Muon's momentum at the first step, which increases to momentum over momentum_warmup steps; default: momentum."""
    momentum_warmup: int = 0
    """Number of steps over which Muon's momentum increases."""
    neuron_beta: float | None = None
    """With muon: NorMuon, which normalizes the update of each neuron (row) by a running mean of its squares, with this
    decay rate (such as 0.95); default: no normalization."""
    cautious_decay: bool = False
    """With muon: apply weight decay only to elements of hidden matrices that the update moves toward zero."""
    rank: int | None = None
    """Rank of the subspace of hidden matrices; default: 128 (1 with apollo_mini)."""
    gap: int | None = None
    """Number of steps between basis refreshes (computations of a new basis for the subspace); default: 200 (10 with
    galore_warm)."""
    lazy: bool | None = None
    """With galore_warm: double the gap while the basis hardly changes, and halve it while it changes a lot; default:
    false."""
    moment_transfer: Literal["first", "both", "align", "keep"] | None = None
    """With galore_warm: how moments move to a new basis: first (project the first moment), both (project both), align
    (rotate the new basis toward the old one) or keep (leave them unchanged); default: first."""
    scale: float | None = None
    """Factor for low-rank updates; default: 0.25 with galore, qgalore, fira; sqrt(128) with apollo_mini; else 1."""
    side: Literal["right", "left", "std", "cheapest"] | None = None
    """With galore_warm: side of a matrix to project: right (columns), left (rows), std (the shorter side) or cheapest
    (least memory); default: right."""
    store: Literal["fp32", "bf16", "int8"] | None = None
    """With galore_warm, apollo and fira: storage format of the moments, including those of parameters without a
    subspace; default: fp32."""
    basis_store: Literal["fp32", "bf16", "int8", "int4"] | None = None
    """With galore_warm: storage format of the basis of a subspace; default: fp32."""
    start: Literal["gradient", "random"] | None = None
    """With galore_warm: where the first basis comes from: gradient (computed from the first gradient) or random
    (replaced within the first steps); default: gradient, or random with train.optimizer_in_backward."""
    projection_type: Literal["std", "reverse_std", "right", "left", "full"] | None = None
    """With galore: side of a matrix to project; default: std, the shorter side."""
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
            ("momentum_start", self.momentum_start), ("neuron_beta", self.neuron_beta),
        ):  # fmt: skip
            if value is not None and not 0 <= value < 1:
                raise ConfigError(f"optim.{name}: expected numbers in [0, 1), got {value}")
        for name in ("rank", "gap"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"optim.{name}: expected an integer >= 1, got {value}")
        optimizer_specific = {option for options in OPTIONS_BY_OPTIMIZER.values() for option in options}
        for name in sorted(optimizer_specific - set(OPTIONS_BY_OPTIMIZER[self.name])):
            check_unused("optim", self, (name,), f"optim.name = {_optimizers_with(name)}")
        if (self.momentum_start is None) != (self.momentum_warmup == 0):
            raise ConfigError(
                "optim.momentum_start and optim.momentum_warmup must be set together: set both or neither"
            )
        for group in self.groups:
            if not self.has_option("rank"):
                check_unused("optim.groups", group, ("rank", "subspace"), f"optim.name = {_optimizers_with('rank')}")

    def has_option(self, option: str) -> bool:
        """Whether this optimizer accepts `option`, one of those that only some optimizers have."""
        return option in OPTIONS_BY_OPTIMIZER[self.name]

    @property
    def projects_rows(self) -> bool:
        """Whether some matrices are projected along their rows."""
        preset = getattr(OPTIMIZERS[self.name], "preset", {})
        return (self.side or preset.get("side", "right")) != "right"

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
    "muon": ("momentum", "momentum_start", "momentum_warmup", "neuron_beta", "cautious_decay"),
}
"""Options accepted by only some optimizers; rejected for others, where they would have no effect."""

DENSE_ONLY = frozenset({"galore", "muon"})
"""Optimizers that cannot update quantized weights: they have no stochastic rounding."""


def _optimizers_with(option: str) -> str:
    return " or ".join(name for name, options in OPTIONS_BY_OPTIMIZER.items() if option in options)


# Parameter roles and groups

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
    embedding_ids = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    get_head = getattr(model, "get_output_embeddings", None)
    head = getattr(model, "lm_head", None) if get_head is None else get_head()
    head_ids = {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()

    def role(parameter: nn.Parameter) -> Role:
        if parameter.ndim < 2:
            return "scalar"
        if id(parameter) in embedding_ids:
            return "embedding"
        return "head" if id(parameter) in head_ids else "hidden"

    classified = [
        ParameterInfo(name, parameter, role(parameter), splits.get(name, ()))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    if not classified:
        raise OptimizerError(f"{type(model).__name__} has no trainable parameters: set requires_grad on some")
    return classified


def build_optimizer(
    config: OptimConfig,
    parameters: Sequence[ParameterInfo],
    *,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> Optimizer:
    """The optimizer over `parameters`, with one group per combination of learning rate, decay and rule.

    Hidden matrices are updated by the named optimizer; embeddings, head, norms and biases by AdamW. Fused matrices (q,
    k, v) stay fused in a subspace: they share their input, which is the side that is projected by default, and each
    row has its own moments. Each group has its `peak_lr` and the `names` of its parameters. `seed` is for random bases
    and stochastic rounding. `process_group`: ranks with replicas of the parameters, which share the work of Muon.
    """
    _check_patterns(config, parameters)
    _check_quantized(config, parameters)
    # Parameters of other pipeline stages are meta tensors; a model that is only being planned consists of them.
    parameters = [item for item in parameters if not item.parameter.is_meta] or parameters
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for item in parameters:
        options = _group_options(config, item)
        group = groups.setdefault(tuple(options.items()), {"params": [], "names": [], **options})
        group["params"].append(item.parameter)
        group["names"].append(item.name)
        if config.name == "muon":
            group.setdefault("splits", []).append(item.splits)
    _warn_about_full_rank(config, groups.values())
    constructor = OPTIMIZERS[config.name]
    options = {name: getattr(config, name) for name in ("lr", "betas", "eps", *OPTIONS_BY_OPTIMIZER[config.name])}
    if isinstance(constructor, type) and issubclass(constructor, LowRankOptimizer):
        options["seed"] = seed % 2**32
    if constructor is Muon:
        options["process_group"] = process_group
    return constructor(list(groups.values()), **{name: value for name, value in options.items() if value is not None})


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
        matched = [item.parameter for item in parameters if re.search(group.pattern, item.name)]
        if not matched:
            raise ConfigError(f"optim.groups {group.pattern!r}: no parameter name matches this pattern")
        if (group.rank is not None or group.subspace is not None) and all(parameter.ndim < 2 for parameter in matched):
            raise ConfigError(
                f"optim.groups {group.pattern!r}: rank and subspace apply to matrices, but only vectors match this "
                "pattern: remove them"
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


def _warn_about_full_rank(config: OptimConfig, groups: Iterable[dict[str, Any]]) -> None:
    if not config.has_option("rank") or config.name == "apollo_mini":
        return
    for group in groups:
        rank = group.get("rank", config.rank or DEFAULT_RANK)
        matrices = [p for p in group["params"] if rank is not None and p.ndim >= 2]
        full = [p for p in matrices if min(matrix_shape(p.shape)[-2:]) <= rank]
        if full:
            logger.warning(
                "rank %d is the full rank of %d parameters, for example of shape %s: a subspace saves nothing there; "
                "use a smaller optim.rank", rank, len(full), tuple(full[0].shape),
            )  # fmt: skip


# Saved state


def restore_optimizer(optimizer: Optimizer, saved: dict[str, Any], *, partial: bool = False) -> None:
    """Load saved state by parameter name; groups and options of `optimizer` do not change.

    With `partial`, the state may also be for parameters that this optimizer does not have.
    Raises `OptimizerError` if the state was saved for other parameters or with incompatible options.
    """
    state_dict = optimizer.state_dict()
    current, restored = (_by_name(groups) for groups in (state_dict["param_groups"], saved["param_groups"]))
    if mismatched := sorted(current.keys() - restored.keys() if partial else current.keys() ^ restored.keys()):
        raise OptimizerError(
            f"the saved optimizer state is for different parameters: {mismatched[0]} is in only one of the two"
        )
    for name, (_, group) in current.items():
        saved_group = restored[name][1]
        if group.keys() != saved_group.keys():
            raise OptimizerError("the saved state is from a different optimizer: use the one that the run started with")
        for option in STATE_OPTIONS:
            if group.get(option) != saved_group.get(option):
                raise OptimizerError(
                    f"saved state of {name}: expected {option} = {group[option]!r}, got {saved_group[option]!r}"
                )
    states = {index: saved["state"].get(restored[name][0]) for name, (index, _) in current.items()}
    state_dict["state"] = {index: state for index, state in states.items() if state is not None}
    state_dict |= {name: value for name, value in saved.items() if name == "skipped"}
    optimizer.load_state_dict(state_dict)


def _by_name(groups: list[dict[str, Any]]) -> dict[str, tuple[int, dict[str, Any]]]:
    """The index and group of each parameter by name; by index if the optimizer has no names."""
    return {
        name: (index, group)
        for group in groups
        for name, index in zip(group.get("names", group["params"]), group["params"], strict=True)
    }


# Summaries and memory estimates


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """Parameters that differ only in their layer index; sizes are totals."""

    name: str
    """Parameter name with * for the layer index."""
    count: int
    shape: tuple[int, ...]
    dtype: str
    rule: str
    """Short label: subspace, update rule and storage."""
    lr: float
    """The peak, if there is a schedule."""
    weight_decay: float
    weight_bytes: int
    """Bytes of the parameters."""
    state_bytes: int | None
    """Bytes of optimizer state; None if unknown before the first step."""


def parameter_table(model: nn.Module, optimizer: Optimizer) -> tuple[ParameterRow, ...]:
    """A row for each kind of parameter that `optimizer` updates, in the order of the model.

    Parameters may be on any device, including meta. Those that the model does not have are named by their shape.
    """
    optimizer = optimizer.optimizer if isinstance(optimizer, OptimizerInBackward) else optimizer
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    nbytes = state_bytes(optimizer)
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for parameter in (*(p for p in names if p in groups), *(p for p in groups if p not in names)):
        group = groups[parameter]
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", names.get(parameter, str(tuple(parameter.shape))))
        dtype, lr = str(parameter.dtype).removeprefix("torch."), group.get("peak_lr", group["lr"])
        decay, rule = group.get("weight_decay", 0.0), str(group.get("rule", type(optimizer).__name__.lower()))
        if isinstance(optimizer, LowRankOptimizer | GaLore):
            rule = optimizer.describe(parameter)
        key = (name, tuple(parameter.shape), dtype, rule, float(lr), float(decay))
        kinds.setdefault(key, []).append(parameter)
    return tuple(
        ParameterRow(
            name=name, count=len(params), shape=shape, dtype=dtype, rule=rule, lr=lr, weight_decay=decay,
            weight_bytes=sum(parameter.nbytes for parameter in params),
            state_bytes=None if nbytes is None else sum(nbytes.get(parameter, 0) for parameter in params),
        )
        for (name, shape, dtype, rule, lr, decay), params in kinds.items()
    )  # fmt: skip


def state_bytes(optimizer: Optimizer, shards: int = 1) -> dict[Tensor, int] | None:
    """Bytes of optimizer state per parameter; before the first step, computed by stepping a copy on the meta device.

    `shards`: the number of ranks that the rows of each parameter will be sharded over (FSDP). None if unknown
    before the first step, as for optimizers that are neither ours nor torch's.
    """
    optimizer = optimizer.optimizer if isinstance(optimizer, OptimizerInBackward) else optimizer
    if optimizer.state:
        return {parameter: _nbytes(parameter, state, shards) for parameter, state in optimizer.state.items()}
    if not type(optimizer).__module__.startswith(("torch.optim.", "whimbrel.optim.")):
        return None
    try:
        stepped = _meta_copy(optimizer)
    except RuntimeError:  # its step reads values, and there are none on the meta device
        return None
    return {
        parameter: _nbytes(parameter, stepped.state[meta_parameter], shards)
        for group, meta_group in zip(optimizer.param_groups, stepped.param_groups, strict=True)
        for parameter, meta_parameter in zip(group["params"], meta_group["params"], strict=True)
    }


def _meta_copy(optimizer: Optimizer) -> Optimizer:
    """A copy over parameters on the meta device, after one step; `optimizer` itself does not change."""
    stepped = copy.copy(optimizer)
    stepped.state = defaultdict(dict)
    stepped.param_groups = [
        {**group, "fused": False, "foreach": False, "params": [_meta_parameter(p) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    if isinstance(stepped, BaseOptimizer):
        stepped.skip_nonfinite = False  # there are no values to check
    stepped.step()
    return stepped


def _meta_parameter(parameter: Tensor) -> Tensor:
    meta = torch.empty_like(parameter, device="meta", requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        meta.grad = meta.new_empty(meta.shape)
    return meta


def _nbytes(parameter: Tensor, state: Mapping[str, Any], shards: int) -> int:
    """Bytes of the tensors of a state on this rank, or on the largest of `shards`."""
    tensors = {name: to_local(value) for name, value in state.items() if isinstance(value, Tensor)}
    return sum(
        tensor.nbytes if name.startswith("basis") else _shard_nbytes(parameter, tensor, shards)  # each rank has bases
        for name, tensor in tensors.items()
    )


def _shard_nbytes(parameter: Tensor, tensor: Tensor, shards: int) -> int:
    """State tensors with one entry per row of their parameter, or per block of elements, are sharded like it."""
    if tensor.ndim and tensor.shape[0] == parameter.shape[0]:
        return tensor.nbytes // tensor.shape[0] * -(-tensor.shape[0] // shards)
    is_flat = tensor.ndim == 1 and tensor.numel() > 1 and parameter.numel() % tensor.numel() == 0
    return -(-tensor.nbytes // shards) if is_flat else tensor.nbytes
