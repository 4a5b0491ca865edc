"""A table of parameters for summaries and memory estimates: update rule, learning rate, decay and bytes of state."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whimbrel.optim.backward import OptimizerInBackward
from whimbrel.optim.base import BaseOptimizer
from whimbrel.optim.galore import GaLore
from whimbrel.optim.lowrank import LowRankOptimizer

__all__ = ["ParameterRow", "parameter_table", "state_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """Parameters that differ only in their layer index; sizes are totals."""

    name: str
    """Parameter name with * for the layer index."""
    count: int
    shape: tuple[int, ...]
    dtype: str
    rule: str
    """Subspace, update rule and storage in a few words."""
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
        rule, decay = _rule(optimizer, group, parameter), group.get("weight_decay", 0.0)
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


def state_bytes(optimizer: Optimizer) -> dict[Tensor, int] | None:
    """Bytes of optimizer state per parameter; before the first step, computed by stepping a copy on the meta device.

    None if unknown before the first step, as for optimizers that are neither ours nor torch's.
    """
    optimizer = optimizer.optimizer if isinstance(optimizer, OptimizerInBackward) else optimizer
    if optimizer.state:
        return {parameter: _nbytes(state) for parameter, state in optimizer.state.items()}
    if not type(optimizer).__module__.startswith(("torch.optim.", "whimbrel.optim.")):
        return None
    try:
        stepped = _meta_copy(optimizer)
    except RuntimeError:  # its step reads values, and there are none on the meta device
        return None
    return {
        parameter: _nbytes(stepped.state[meta_parameter])
        for group, meta_group in zip(optimizer.param_groups, stepped.param_groups, strict=True)
        for parameter, meta_parameter in zip(group["params"], meta_group["params"], strict=True)
    }


def _rule(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> str:
    if isinstance(optimizer, LowRankOptimizer | GaLore):
        return optimizer.describe(parameter)
    return str(group.get("rule", type(optimizer).__name__.lower()))


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


def _nbytes(state: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
