"""Data parallelism with DDP and FSDP2; norm and clipping of gradients that are sharded over ranks.

The loss of an optimizer step is one mean over all targets of all ranks and micro-batches. DDP and FSDP2 average
gradients over ranks, so each rank divides its loss by (targets of all ranks) / (number of ranks).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whimbrel.base.errors import ConfigError
from whimbrel.distributed.activation_checkpoint import find_blocks
from whimbrel.distributed.deferred_init import digests
from whimbrel.distributed.layout import ParallelConfig
from whimbrel.distributed.state import is_dtensor, to_local
from whimbrel.distributed.world import World

__all__ = [
    "check_same_weights",
    "clip_gradients_",
    "gradient_norm",
    "gradient_sync",
    "norms",
    "pipeline_averages_gradients",
    "reshard_",
    "shard_or_replicate",
    "splits",
    "unwrap",
    "uses_fsdp",
]

WRAPPERS = ("DistributedDataParallel", "PipelineModel")
COMPARED_VALUES = 64
"""Values of each parameter that `check_same_weights` compares."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_same_weights(model: nn.Module, world: World) -> None:
    """Raise ConfigError if ranks start from different weights; compares some values of each parameter."""
    if world.size == 1:
        return
    samples: dict[str, Any] = dict(digests(model))
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            values = getattr(parameter, "codes", parameter).detach().flatten()  # codes of quantized weights
            samples[name] = values[:: max(1, len(values) // COMPARED_VALUES)].double().nan_to_num().tolist()
    found = world.all_gather_object(samples)
    for rank, other in enumerate(found):
        for name in (name for name in found[0] | other if other.get(name) != found[0].get(name)):
            raise ConfigError(
                f"expected the same weights on all ranks, got different values of {name} on rank {rank} and rank 0: "
                "set the same seed on all ranks before creating the model, or pass model_init"
            )


def shard_or_replicate(
    model: nn.Module, world: World, config: ParallelConfig, device: torch.device, *, average_gradients: bool = True
) -> nn.Module:
    """Apply FSDP2 in place, or wrap the model in DDP; a model of one process is returned as it is.

    Pass `average_gradients=False` if the optimizer averages gradients itself: DDP is then not applied.
    """
    layout = world.layout
    if world.mesh is None or config.strategy == "diloco" or pipeline_averages_gradients(world, config):
        return model
    if uses_fsdp(world, config):
        _fully_shard(model, world, config)
        return model
    if not average_gradients or (layout.dp_replicate == 1 and (config.strategy != "ddp" or layout.world_size > 1)):
        return model
    from torch.nn.parallel import DistributedDataParallel

    # Ranks start from equal weights (one seed, or one file). Buffers such as BatchNorm statistics follow rank 0 in each
    # forward pass, except those that are not saved: tables that never change.
    tables = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    ]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, tables)
    replica = DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, process_group=world.dp_group, init_sync=False,
        gradient_as_bucket_view=True,
    )  # fmt: skip
    if layout.dp_replicate > 2:
        _rebuild_buckets(replica)
    return replica


def _rebuild_buckets(replica: Any) -> None:
    """Make DDP rebuild its buckets now, with a dummy backward pass.

    DDP rebuilds them after the first backward pass, in the order in which gradients arrived. With three or more ranks,
    the position in a bucket determines the order of summation, so the first step of a resumed run would round
    differently from the same step of an uninterrupted run.
    """
    replica.reducer.prepare_for_backward([])
    parameters = [parameter for parameter in replica.parameters() if parameter.requires_grad]
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        total = total + parameter.flatten()[:0].float().sum()
    total.backward()
    for parameter in parameters:
        parameter.grad = None


def uses_fsdp(world: World, config: ParallelConfig) -> bool:
    """Whether to apply FSDP2: to shard, or to replicate a tensor-parallel model."""
    layout = world.layout
    is_fsdp = layout.dp_shard > 1 or config.strategy in ("fsdp", "hsdp")
    return world.mesh is not None and (is_fsdp or (layout.pp == 1 and layout.tp > 1 and layout.dp_replicate > 1))


def splits(world: World, config: ParallelConfig) -> bool:
    """Whether ranks have different parts of the model: shards, parts of layers, or stages."""
    return uses_fsdp(world, config) or world.layout.tp > 1 or world.layout.pp > 1


def pipeline_averages_gradients(world: World, config: ParallelConfig) -> bool:
    """Whether a pipeline averages gradients over replicas itself: DDP cannot reduce two stages of one rank."""
    return world.layout.pp > 1 and not uses_fsdp(world, config)


def _fully_shard(model: nn.Module, world: World, config: ParallelConfig) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    assert world.mesh is not None
    mesh = world.mesh["dp_replicate", "dp_shard"] if world.layout.dp_replicate > 1 else world.mesh["dp_shard"]
    dtype = None if config.param_dtype is None else DTYPES[config.param_dtype]
    # FSDP2 would store shards of quantized weights unquantized, so frozen ones stay complete on every rank.
    quantized = {parameter for parameter in model.parameters() if hasattr(parameter, "codes")}
    if any(parameter.requires_grad for parameter in quantized):
        raise ConfigError("fsdp cannot shard weights that are trained quantized (train.weight_dtype): use ddp")
    options: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": quantized,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32),
        "offload_policy": CPUOffloadPolicy(mesh.device_type == "cuda") if config.cpu_offload else OffloadPolicy(),
    }
    reshard = config.reshard_after_forward and world.layout.dp_shard > 1  # one shard is the complete parameter
    for block in find_blocks(model, optional=True):
        fully_shard(block, reshard_after_forward=reshard, **options)
    # What is left in the root (embedding, final norm, head) is used at both ends of the forward pass, and the backward
    # pass starts with it: freeing it in between would only cost an all-gather.
    fully_shard(model, reshard_after_forward=False, **options)


def unwrap(model: nn.Module) -> nn.Module:
    """The model, without wrappers of DDP, pipelines and torch.compile."""
    inner: Any = getattr(model, "_orig_mod", model)
    module: nn.Module = inner.module if type(inner).__name__ in WRAPPERS else inner
    return module


def gradient_sync(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Reduce gradients over replicas in the backward pass of the last micro-batch only.

    Shards are reduced in every backward pass: until then, each rank would hold the gradients of the complete model.
    """
    if (set_all_reduce := getattr(model, "set_requires_all_reduce", None)) is not None:  # FSDP2
        set_all_reduce(last)
    elif not last and (no_sync := getattr(model, "no_sync", None)) is not None:  # DDP
        return no_sync()  # type: ignore[no-any-return]
    return contextlib.nullcontext()


def gradient_norm(parameters: Iterable[Tensor], world: World) -> Tensor:
    """The global gradient norm over all shards and pipeline stages; a tied parameter counts once."""
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None and not hasattr(parameter, "is_copy"):
            placement = (grad.device_mesh, grad.placements) if is_dtensor(grad) else None
            groups.setdefault(placement, []).append(grad)
    if groups.keys() <= {None} and world.layout.pp == 1:
        return nn.utils.get_total_norm(groups.get(None, []))
    # Sums over local shards: the same arithmetic on DTensors takes several times as long on the host.
    squares = []
    for placement, grads in groups.items():
        squares.append(nn.utils.get_total_norm([to_local(grad) for grad in grads]).square())
        for dim, kind in enumerate(() if placement is None else placement[1]):
            if not kind.is_replicate():
                dist.all_reduce(squares[-1], group=placement[0].get_group(dim))
    assert world.mesh is not None
    square = torch.stack(squares).sum() if squares else torch.zeros((), device=world.mesh.device_type)
    if world.layout.pp > 1:
        dist.all_reduce(square, group=world.mesh["pp"].get_group())
    return square.sqrt()


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each tensor, over all its shards."""
    values = list(torch._foreach_norm([to_local(tensor) for tensor in tensors]))
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if is_dtensor(tensor):
            groups.setdefault((tensor.device_mesh, tensor.placements), []).append(index)
    for placement, indices in groups.items():
        squares = torch.stack([values[index].float().square() for index in indices])
        for dim, kind in enumerate(placement[1]):
            if not kind.is_replicate():
                dist.all_reduce(squares, group=placement[0].get_group(dim))
        for index, value in zip(indices, squares.sqrt(), strict=True):
            values[index] = value
    return values


def reshard_(model: nn.Module) -> None:
    """Free parameters that FSDP2 gathered for a forward pass: only shards can be changed."""
    for module in model.modules():
        if (reshard := getattr(module, "reshard", None)) is not None and hasattr(module, "unshard"):
            reshard()


def clip_gradients_(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients, whose norm is `norm`, so that it is at most `max_norm`."""
    if not any(is_dtensor(parameter) for parameter in parameters):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is not None:
            local = to_local(grad)
            local.mul_(factor.to(local.device))
