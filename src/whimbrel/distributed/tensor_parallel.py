"""Tensor parallelism with DTensor: ranks split the heads and the MLP width of every block.

A model lists its layers in `tp_plan`, as transformers models do: module name patterns with the style of each layer.
"colwise" splits the output features of a linear, "rowwise" its input features; one all-reduce follows every "rowwise"
layer. Embeddings, norms and the head stay complete on every rank, even if the plan splits them.

A fused linear (Q, K and V, or gate and up, in one weight) is "colwise" too, but every rank needs its part of each of
the fused matrices. Its rows are therefore permuted before they are split; `state.full_tensor` undoes the permutation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["apply_tensor_parallel", "row_order"]

COMPLETE = ("embedding_rowwise", "colwise_gather_output")
"""Styles of the embedding and the head in transformers: their layers are not split."""


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers in `model.tp_plan` over the ranks of a 1-D mesh, in place."""
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    size = mesh.size()
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    modules = {name: style for name, _ in model.named_modules() if (style := _style_of(name, plan)) is not None}
    if not modules:
        raise ConfigError(f"expected a model with a tp_plan for parallel.tp, got {type(model).__name__}: use fsdp")
    _check_heads(model, size)
    styles: dict[str, ParallelStyle] = {}
    for name, style in modules.items():
        module = model.get_submodule(name)
        if style in ("colwise", "rowwise") and any(True for _ in module.children()):
            raise ConfigError(
                f"tensor parallelism cannot split the adapters of {name}: set parallel.tp = 1 and use fsdp"
            )
        if style == "rowwise":
            styles[name] = RowwiseParallel()
        elif style == "colwise":
            _reorder_rows(module, name, size)
            styles[name] = ColwiseParallel()
        elif style == "replicated_with_grad_allreduce":
            module.register_forward_pre_hook(partial(_sum_gradients, group=mesh.get_group()))
        elif style == "heads":
            module.split_heads(size)  # type: ignore[operator]
        elif style not in COMPLETE:
            raise ConfigError(f"unknown tensor-parallel style '{style}' of {name}: use colwise or rowwise")
    parallelize_module(model, mesh, styles)


def row_order(rows: tuple[int, ...], size: int) -> Tensor:
    """A permutation of the rows of fused matrices (`rows` of each) that gives each of `size` chunks a part of each."""
    parts = [part.chunk(size) for part in torch.arange(sum(rows)).split(rows)]
    return torch.cat([part[rank] for rank in range(size) for part in parts])


def _check_heads(model: nn.Module, size: int) -> None:
    """Raise ConfigError if ranks would get parts of heads."""
    config = next((module.config for module in model.modules() if hasattr(module, "config")), None)
    if getattr(config, "value_embeddings", 0):
        raise ConfigError("tensor parallelism does not split value embeddings: set parallel.tp = 1 and use fsdp")
    for name in ("num_attention_heads", "num_heads", "num_key_value_heads", "kv_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ConfigError(f"expected parallel.tp that divides {name} = {heads}, got {size}: lower tp, or use fsdp")


def _reorder_rows(linear: Any, name: str, size: int) -> None:
    weight: Tensor = linear.weight
    rows = getattr(linear, "fused_rows", (len(weight),))
    if any(count % size for count in rows):
        raise ConfigError(
            f"expected parallel.tp that divides the rows of {name}, {' + '.join(map(str, rows))}, got {size}"
        )
    linear.tp_ranks = size
    if len(rows) > 1:
        order = row_order(rows, size).to(weight.device)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(parameter[order])


def _style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """The style of a module; `*` in a pattern stands for a number."""
    return next(
        (style for pattern, style in plan.items() if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name)),
        None,
    )


def _sum_gradients(module: nn.Module, _inputs: Any, *, group: dist.ProcessGroup) -> None:
    """Sum the weight gradients of a module whose input is split: each rank computes only its part of them.

    A forward hook, because the parameters that FSDP2 gathers do not exist before the first forward pass.
    """
    for parameter in module.parameters(recurse=False):
        if not hasattr(parameter, "_summed"):
            parameter._summed = parameter.register_hook(partial(_all_reduce, group=group))  # type: ignore[attr-defined]


def _all_reduce(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total
