"""Optimizers on several ranks: parameters sharded by FSDP2 (DTensor), and replicas as under DDP.

Sharded parameters: FSDP2 shards every matrix by rows. The projection R = G Q works row by row, so it
needs no communication. Whatever does depend on all rows, mainly the search for a new basis, is a sum over rows: each
rank sums its own rows, the small result is all-reduced, and every rank continues from the same bits. A 3-D stack of
matrices is sharded by complete matrices, so nearly everything about it is local.

Replicated parameters: every rank takes the same step from the same averaged gradients. Bases, moments and random
numbers are bit-identical without any communication. If gradients are not averaged (`Replicas`), their products with a
few vectors are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from whimbrel.base.errors import OptimizerError, ParallelError
from whimbrel.distributed.state import copy_full_, full_tensor, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Ranks",
    "Replicas",
    "RowSharding",
    "all_ranks_true",
    "are_replicated",
    "average_",
    "check_replicas",
    "copy_",
    "gather_rows",
    "grad_times",
    "grad_transposed_times",
    "mean_over_stack",
    "randn",
    "shard_of",
    "sum_over_ranks",
    "sum_rows",
]


class RowSharding:
    """How the first dimension (of length `size`) of a parameter is split over ranks.

    Each rank owns `per_rank` indices; this rank's begin at `start`. Trailing ranks may own fewer, or none.
    """

    def __init__(self, parameter: DTensor) -> None:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor import Shard as ShardPlacement

        self.mesh, self.placements = parameter.device_mesh, parameter.placements
        split = [dim for dim, placement in enumerate(self.placements) if not isinstance(placement, Replicate)]
        if len(split) != 1 or self.placements[split[0]] != ShardPlacement(0):
            raise OptimizerError(
                "expected a parameter sharded by its first dimension over one mesh dimension, as by "
                f"fully_shard(model), got placements {self.placements} for shape {tuple(parameter.shape)}"
            )
        self.group = self.mesh.get_group(split[0])
        self.size, self.stacked = parameter.shape[0], parameter.ndim == 3
        self.rank, self.ranks = self.mesh.get_local_rank(split[0]), self.mesh.size(split[0])
        self.per_rank = -(-self.size // self.ranks)
        self.start = min(self.size, self.per_rank * self.rank)

    def full_shape(self, local_shape: Sequence[int]) -> torch.Size:
        """The global shape of a tensor whose local part has `local_shape`."""
        return torch.Size((self.size, *local_shape[1:]))

    def local_part(self, tensor: Tensor, count: int) -> Tensor:
        """The `count` first-dimension indices of a full tensor that belong to this rank."""
        return tensor[self.start : self.start + count]

    def count_rows(self, lengths: Sequence[int]) -> list[list[int]]:
        """The number of rows on each rank of consecutive parts of the parameter, which have `lengths` rows."""
        counts, first = [], 0
        for length in lengths:
            bounds = [min(max(self.per_rank * rank - first, 0), length) for rank in range(self.ranks + 1)]
            counts.append([end - start for start, end in pairwise(bounds)])
            first += length
        return counts

    def wrap(self, tensor: Tensor, block: int = 1) -> Tensor:
        """A local part as a DTensor sharded like the parameter, so that checkpoints can reshard it.

        Its first dimension has one entry per `block` rows of the parameter (more than 1 for block-wise scales).
        """
        from torch.distributed.tensor import DTensor

        full = torch.empty((-(-self.size // block), *tensor.shape[1:]), device="meta")
        return DTensor.from_local(tensor, self.mesh, self.placements, shape=full.shape, stride=full.stride())


class Replicas(NamedTuple):
    """The ranks that have copies of a parameter, each with its own gradient: the gradient of a step is their mean."""

    group: dist.ProcessGroup


def shard_of(parameter: Tensor) -> RowSharding | None:
    """The sharding of a parameter; None for a regular tensor."""
    return RowSharding(parameter) if is_dtensor(parameter) else None


Ranks: TypeAlias = RowSharding | Replicas | None
"""The ranks that compute a gradient together; None: this process alone."""


def copy_(target: Tensor, source: Tensor) -> None:
    """Copy between tensors of one global shape, either of them a DTensor or not."""
    if is_dtensor(target) == is_dtensor(source):
        target.copy_(source)
    else:
        copy_full_(target, full_tensor(source))


def randn(size: Sequence[int], generator: torch.Generator, device: torch.device, ranks: Ranks = None) -> Tensor:
    """Standard normal fp32 samples; with a shard, this rank's slice of what a single process would sample."""
    if not isinstance(ranks, RowSharding):
        return torch.randn(tuple(size), generator=generator, device=device, dtype=torch.float32)
    return ranks.local_part(randn(ranks.full_shape(size), generator, device), size[0])


def sum_rows(tensor: Tensor, ranks: Ranks) -> Tensor:
    """All-reduce per-rank sums over rows; a stack is sharded by complete matrices, so it is returned unchanged."""
    return _all_reduce(tensor, ranks) if isinstance(ranks, RowSharding) and not ranks.stacked else tensor


def grad_times(grad: Tensor, matrix: Tensor, ranks: Ranks) -> Tensor:
    """G X, where G is the gradient of the step and `grad` this rank's part of it."""
    product = grad @ matrix
    return _mean(product, ranks) if isinstance(ranks, Replicas) else product


def grad_transposed_times(grad: Tensor, matrix: Tensor, ranks: Ranks) -> Tensor:
    """G^T Y in fp32, where G is the gradient of the step and `grad` this rank's part of it."""
    product = (grad.mT @ matrix).float()
    return _mean(product, ranks) if isinstance(ranks, Replicas) else sum_rows(product, ranks)


def mean_over_stack(values: Tensor, shard: RowSharding | None) -> Tensor:
    """The mean of one value per matrix over all matrices of a stack; for a single matrix, its value."""
    if shard is None or not shard.stacked:
        return values.float().mean()
    return _all_reduce(values.float().sum(), shard) / shard.size


def gather_rows(tensor: Tensor, shard: RowSharding | None) -> Tensor:
    """All-gather the rows of a matrix on every rank; a stack is returned unchanged."""
    if shard is None or shard.stacked:
        return tensor
    return full_tensor(shard.wrap(tensor))


def all_ranks_true(local: Tensor, shards: Iterable[RowSharding | None]) -> bool:
    """Whether `local` is true on every rank that shards these parameters; all ranks get the same result."""
    num_false = (~local).float()
    for shard in {shard.group: shard for shard in shards if shard is not None}.values():
        num_false = _all_reduce(num_false, shard)
    return not bool(num_false)


def sum_over_ranks(values: Iterable[tuple[Tensor, RowSharding | None]]) -> Tensor:
    """Sum values that were computed from local shards, over all shards and all parameters; 0 without values."""
    by_group: dict[Any, list[Tensor]] = {}
    shards = {}
    for value, shard in values:
        group = None if shard is None else shard.group
        shards[group] = shard
        by_group.setdefault(group, []).append(value)
    if not by_group:
        return torch.zeros(())
    device = next(iter(by_group.values()))[0].device
    sums = {
        group: torch.stack([value.to(device) for value in group_values]).sum()
        for group, group_values in by_group.items()
    }
    return torch.stack(
        [value if (shard := shards[group]) is None else _all_reduce(value, shard) for group, value in sums.items()]
    ).sum()


def _all_reduce(tensor: Tensor, ranks: RowSharding | Replicas) -> Tensor:
    total = tensor.contiguous()
    dist.all_reduce(total, group=ranks.group)
    return total


def _mean(tensor: Tensor, replicas: Replicas) -> Tensor:
    return _all_reduce(tensor / dist.get_world_size(replicas.group), replicas)


def are_replicated(params: Iterable[Tensor]) -> bool:
    """Whether other ranks may have copies of some of these parameters."""
    multiple_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return multiple_ranks and not all(is_dtensor(parameter) for parameter in params)


def average_(tensors: Sequence[Tensor], present: Sequence[bool], group: dist.ProcessGroup) -> list[bool]:
    """Average tensors over the ranks of a group, in place; returns which of them are present on at least one rank.

    `present[i]` is False if tensor i is only zeros on this rank. Synchronizes with the device only if some are
    missing here.
    """
    present_on_any_rank = torch.tensor(present, dtype=torch.int32, device=tensors[0].device)
    torch._foreach_div_(list(tensors), dist.get_world_size(group))
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in (present_on_any_rank, *tensors)]:
        assert work is not None
        work.wait()
    return list(present) if all(present) else present_on_any_rank.bool().tolist()


def check_replicas(optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | None = None) -> None:
    """Raise `ParallelError` if weights or optimizer state are not bit-identical on all ranks.

    Sharded tensors are ignored. Hashes every tensor, so call it rarely.
    """
    local = _digests(optimizer)
    digests_by_rank: list[dict[str, str]] = [local] * dist.get_world_size(process_group)
    dist.all_gather_object(digests_by_rank, local, group=process_group)
    for rank, digests in enumerate(digests_by_rank):
        reference = digests_by_rank[0]
        different = sorted(
            name for name in reference.keys() | digests.keys() if reference.get(name) != digests.get(name)
        )
        if different:
            raise ParallelError(
                f"the {different[0]} on rank {rank} differs from rank 0: average gradients over all ranks before every "
                "step, and resume from the last checkpoint"
            )


def _digests(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A SHA-256 of every weight and state tensor, by a readable name."""
    digests = {}
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("names") or group.get("param_names") or range(len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            owner = f"of {name}" if isinstance(name, str) else f"of parameter {name} of group {group_index}"
            for kind, tensor in {"weight": parameter.detach(), **optimizer.state.get(parameter, {})}.items():
                if isinstance(tensor, Tensor) and not is_dtensor(tensor):
                    digests[f"{kind} {owner}"] = _digest(tensor)
    return digests


def _digest(tensor: Tensor) -> str:
    whole: Any = tensor
    quantized = is_traceable_wrapper_subclass(whole)  # codes and scales
    parts = [getattr(whole, name) for name in whole.__tensor_flatten__()[0]] if quantized else [whole]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
