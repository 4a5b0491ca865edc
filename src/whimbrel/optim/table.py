"""Who got what: each parameter's rule, learning rate and decay, and the bytes that its optimizer keeps for it."""

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

from whimbrel.optim.careful import Careful
from whimbrel.optim.composed import Composed
from whimbrel.optim.galore import GaLore
from whimbrel.optim.in_backward import InBackward

__all__ = ["ParameterRow", "parameter_table", "state_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """Parameters that differ in the number of their block alone; sizes are of all of them together."""

    name: str
    """With * for the number of a block."""
    count: int
    shape: tuple[int, ...]
    dtype: str
    rule: str
    """What moves them, in a few words."""
    lr: float
    """At its peak, where a schedule is known to move it."""
    weight_decay: float
    weights: int
    """Bytes of the parameters."""
    state: int | None
    """Bytes that the optimizer keeps; None where nobody knows before the first step."""


def parameter_table(model: nn.Module, optimizer: Optimizer) -> tuple[ParameterRow, ...]:
    """A row for each kind of parameter that `optimizer` moves, in the order of the model; for summaries and estimates.

    Parameters may be on any device, the meta device too. Those that the model does not have go by their shape.
    """
    optimizer = optimizer.optimizer if isinstance(optimizer, InBackward) else optimizer
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    held = state_bytes(optimizer)
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for parameter in (*(p for p in names if p in groups), *(p for p in groups if p not in names)):
        group = groups[parameter]
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", names.get(parameter, str(tuple(parameter.shape))))
        dtype, rate = str(parameter.dtype).removeprefix("torch."), group.get("peak_lr", group["lr"])
        rule, decay = _rule(optimizer, group, parameter), group.get("weight_decay", 0.0)
        key = (name, tuple(parameter.shape), dtype, rule, float(rate), float(decay))
        kinds.setdefault(key, []).append(parameter)
    return tuple(
        ParameterRow(
            name=name, count=len(alike), shape=shape, dtype=dtype, rule=rule, lr=rate, weight_decay=decay,
            weights=sum(parameter.nbytes for parameter in alike),
            state=None if held is None else sum(held.get(parameter, 0) for parameter in alike),
        )
        for (name, shape, dtype, rule, rate, decay), alike in kinds.items()
    )  # fmt: skip


def state_bytes(optimizer: Optimizer) -> dict[Tensor, int] | None:
    """Bytes that an optimizer keeps for each parameter; before its first step, what one on the meta device makes.

    None where nobody knows before the first step, as with an optimizer from elsewhere.
    """
    optimizer = optimizer.optimizer if isinstance(optimizer, InBackward) else optimizer
    if optimizer.state:
        return {parameter: _bytes(state) for parameter, state in optimizer.state.items()}
    if not type(optimizer).__module__.startswith(("torch.optim.", "whimbrel.optim.")):
        return None
    try:
        twin = _stepped_twin(optimizer)
    except RuntimeError:  # its step looks at values, and there are none on the meta device
        return None
    return {
        parameter: _bytes(twin.state[ghost])
        for own, ghosts in zip(optimizer.param_groups, twin.param_groups, strict=True)
        for parameter, ghost in zip(own["params"], ghosts["params"], strict=True)
    }


def _rule(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> str:
    """What moves a parameter, in a few words."""
    if isinstance(optimizer, Composed):
        return optimizer.describe(parameter)
    if isinstance(optimizer, GaLore):
        bases = [basis for name, basis in optimizer.state[parameter].items() if name.startswith("ortho_matrix")]
        return f"svd rank {min(bases[0].shape[-2:])}, adamw" if bases else "adamw"
    return str(group.get("rule", type(optimizer).__name__.lower()))


def _stepped_twin(optimizer: Optimizer) -> Optimizer:
    """A copy that has made one step with parameters that take no memory; `optimizer` itself is left alone."""
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "fused": False, "foreach": False, "params": [_ghost(parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    if isinstance(twin, Careful):
        twin.skip_nonfinite = False  # shapes alone are neither finite nor not
    twin.step()
    return twin


def _ghost(parameter: Tensor) -> Tensor:
    """A parameter with a gradient, of which only shape and dtype are real."""
    ghost = torch.empty_like(parameter, device="meta", requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        ghost.grad = ghost.new_empty(ghost.shape)
    return ghost


def _bytes(state: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
