"""Computations that need complete matrices, shared by ranks: each matrix has an owner, which computes its result.

Replicas (DDP): all ranks have all matrices, and all-gather the results. Shards (FSDP2): all ranks send their rows of
each matrix to its owner and receive the rows of the result, with one all-to-all each way for all matrices of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["assign_owners", "map_replicated", "map_sharded"]

MapStack = Callable[[Tensor], Tensor]
"""A function of a stack of matrices (k, m, n), which returns a stack of the same shape."""


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The owner of each item: the most expensive ones first, each to the rank with the least to do."""
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # cost, number of items, rank
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        cost, count, rank = min(loads)
        loads[rank] = (cost + costs[index], count + 1, rank)
        owners[index] = rank
    return owners


def map_replicated(
    function: MapStack, matrices: Sequence[Tensor], owners: Sequence[int], group: dist.ProcessGroup
) -> list[Tensor]:
    """Apply `function` to matrices of one shape that every rank has; each rank computes those it owns."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    owned = [[index for index, owner in enumerate(owners) if owner == other] for other in range(ranks)]
    first = matrices[0]
    results = first.new_empty(ranks, max(map(len, owned)), *first.shape)
    if mine := owned[rank]:
        results[rank, : len(mine)] = function(torch.stack([matrices[index] for index in mine]))
    dist.all_gather(list(results), results[rank].clone(), group=group)
    slots = {index: (other, slot) for other, indices in enumerate(owned) for slot, index in enumerate(indices)}
    return [results[slots[index]] for index in range(len(matrices))]


def map_sharded(
    function: MapStack,
    parts: Sequence[Tensor],
    rows: Sequence[Sequence[int]],
    owners: Sequence[int],
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Apply `function` to matrices of one shape that are split by rows; returns this rank's rows of the results.

    `parts` are this rank's rows of each matrix, and `rows[i][r]` is the number of rows of matrix i on rank r.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    owned = [[index for index, owner in enumerate(owners) if owner == other] for other in range(ranks)]
    mine, width, first = owned[rank], parts[0].shape[1], parts[0]

    # The chunk from rank a to rank b consists of the rows on rank a of the matrices that rank b owns.
    to_owners = [width * sum(rows[index][rank] for index in owned[other]) for other in range(ranks)]
    to_shards = [width * sum(rows[index][other] for index in mine) for other in range(ranks)]
    by_owner = [parts[index].reshape(-1) for indices in owned for index in indices]
    received = _all_to_all(by_owner, to_owners, to_shards, first, group)
    chunks = [
        list(chunk.view(-1, width).split([rows[index][other] for index in mine]))
        for other, chunk in enumerate(received.split(to_shards))
    ]
    by_shard: list[Tensor] = []
    if mine:
        results = function(torch.stack([torch.cat(matrix) for matrix in zip(*chunks, strict=True)]))
        split = [result.split(list(rows[index])) for index, result in zip(mine, results, strict=True)]
        by_shard = [part.reshape(-1) for parts_of_rank in zip(*split, strict=True) for part in parts_of_rank]
    received = _all_to_all(by_shard, to_shards, to_owners, first, group)
    order = [index for indices in owned for index in indices]
    found = dict(zip(order, received.view(-1, width).split([rows[index][rank] for index in order]), strict=True))
    return [found[index] for index in range(len(parts))]


def _all_to_all(
    parts: list[Tensor], sizes: list[int], received_sizes: list[int], like: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Send flat parts, in the order of ranks; `sizes` are the numbers of elements per rank."""
    sent = torch.cat(parts) if parts else like.new_empty(0)
    received = sent.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, sent, received_sizes, sizes, group=group)
    return received
