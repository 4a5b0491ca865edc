"""Gather full tensors from shards and shard them again, so that checkpoints do not depend on the layout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from whimbrel.distributed.tensor_parallel import row_order

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from whimbrel.distributed.world import World

__all__ = [
    "Part",
    "canonical_names",
    "copy_full_",
    "full_state",
    "full_tensor",
    "gather_full",
    "is_distributed_model",
    "is_dtensor",
    "lazy_gather_state",
    "load_full_",
    "local_part",
    "to_local",
]


class Piece(NamedTuple):
    """Local rows `start` to `stop`, and the index of their first element in the complete tensor."""

    start: int
    stop: int
    offset: tuple[int, ...]


class Part(NamedTuple):
    """The part of a sharded tensor that this rank holds."""

    local: Tensor
    offset: tuple[int, ...]
    """Index of its first element in the complete tensor."""
    is_writer: bool
    """False if another rank with the same part saves it."""

    def pieces(self, order: Tensor | None = None) -> list[Piece]:
        """The pieces of the part that are contiguous in the complete tensor; `order` is the order of its rows."""
        rows = len(self.local) if self.local.ndim else 1
        if order is None or not rows:
            return [Piece(0, rows, self.offset)] if self.local.numel() else []
        indices = order[self.offset[0] : self.offset[0] + rows]
        starts = [0, *(indices.diff() != 1).nonzero().flatten().add(1).tolist()]
        return [
            Piece(start, stop, (int(indices[start]), *self.offset[1:]))
            for start, stop in itertools.pairwise([*starts, rows])
        ]


@dataclass(frozen=True)
class LazyGather:
    """A tensor whose parts are on several ranks, to be gathered later on rank 0 (see `gather_full`)."""

    shape: torch.Size
    local: Tensor
    """The part of this rank; empty if it has none, or if another rank gathers the same part."""
    pieces: Sequence[Piece]
    """Where its rows belong in the full tensor."""


class Reordered(NamedTuple):
    """A sharded tensor whose rows are in the order `order` (see `row_orders`)."""

    tensor: Tensor
    order: Tensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "placements")


def to_local(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this rank; any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_part(tensor: Any) -> Part:
    """This rank's part of a DTensor; a regular tensor is complete."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not is_dtensor(tensor):
        return Part(tensor, (0,) * tensor.ndim, is_writer=True)
    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    copies = [index for index, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()]
    return Part(tensor.to_local(), tuple(offset), not any(copies))


def from_local_like(target: Any, local: Tensor) -> Tensor:
    """A DTensor with this rank's part `local`, sharded like `target`."""
    from torch.distributed.tensor import DTensor

    local = local.to(target.device)
    return DTensor.from_local(local, target.device_mesh, target.placements, shape=target.shape, stride=target.stride())


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, on all ranks."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def copy_full_(target: Tensor, full: Tensor, order: Tensor | None = None) -> None:
    """Copy a complete tensor to a parameter; each rank copies its part."""
    if target.is_meta:
        return  # another pipeline stage has it
    if order is not None:
        full = full[order.to(full.device)]
    if is_dtensor(target):
        part = local_part(target)
        index = tuple(slice(start, start + size) for start, size in zip(part.offset, part.local.shape, strict=True))
        part.local.copy_(full[index])
    else:
        target.copy_(full)


def is_distributed_model(model: nn.Module) -> bool:
    """Whether other ranks have parts of the model: shards, or pipeline stages."""
    return any(is_dtensor(parameter) or parameter.is_meta for parameter in model.parameters())


def lazy_gather_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor | LazyGather]:
    """`state` with each tensor replaced by a `LazyGather`, to be gathered to rank 0 later; tied tensors share one.

    Tensors of other pipeline stages are meta tensors in `state`. A state that is not sharded is returned unchanged.
    """
    if not any(is_dtensor(tensor) or tensor.is_meta for tensor in state.values()):
        return dict(state)
    orders, names, found = row_orders(model), canonical_names(model), dict[str, Tensor | LazyGather]()
    for name, tensor in state.items():
        found[name] = found.get(names.get(name, name), _lazy_gather(tensor, orders.get(name)))
    return found


def _lazy_gather(tensor: Tensor, order: Tensor | None) -> LazyGather:
    tensor = tensor.detach()
    if not tensor.is_meta:
        part = local_part(tensor)
        if part.is_writer:
            return LazyGather(tensor.shape, part.local, part.pieces(order))
    return LazyGather(tensor.shape, torch.empty(0, dtype=tensor.dtype), ())


def full_state(state: Mapping[str, Tensor | LazyGather], world: World) -> dict[str, Tensor]:
    """Gather the tensors of a state to the host memory of rank 0; other ranks get nothing."""
    sources = {name: tensor for name, tensor in state.items() if isinstance(tensor, LazyGather)}
    if not sources:
        return dict(state)  # type: ignore[arg-type]
    first = {id(source): name for name, source in reversed(sources.items())}  # tied tensors are gathered once
    host = {name: replace(sources[name], local=sources[name].local.cpu()) for name in first.values()}
    full = gather_full(host, world)
    if not world.is_main:
        return {}
    return {name: full[first[id(t)]] if isinstance(t, LazyGather) else t.cpu() for name, t in state.items()}


def gather_full(sources: Mapping[str, LazyGather], world: World) -> dict[str, Tensor]:
    """The full tensors, on rank 0; {} on other ranks. Parts must be in host memory."""
    parts = {name: (source.local.shape, source.pieces) for name, source in sources.items() if source.pieces}
    parts_by_rank = world.all_gather_object(parts)
    full: dict[str, Tensor] = {}
    for name in sorted(sources):
        source, seen = sources[name], set[tuple[int, ...]]()
        if world.is_main:
            full[name] = torch.empty(source.shape, dtype=source.local.dtype)
        for rank, found in enumerate(parts_by_rank):
            shape, pieces = found.get(name, ((), ()))
            if not pieces or pieces[0].offset in seen:
                continue  # replicas of a pipeline stage hold the same tensors
            seen.add(pieces[0].offset)
            part = world.send_to_main(source.local, rank, shape)
            if part is not None:
                _place(full[name], part, pieces)
    return full


def _place(full: Tensor, part: Tensor, pieces: Sequence[Piece]) -> None:
    for start, stop, offset in pieces:
        rows = part[start:stop] if part.ndim else part
        full[tuple(slice(first, first + size) for first, size in zip(offset, rows.shape, strict=True))] = rows


def load_full_(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy complete tensors to parameters and buffers by name; each rank takes its parts."""
    orders, current = row_orders(model), model.state_dict()
    with torch.no_grad():
        for name, full in state.items():
            copy_full_(current[name], full, orders.get(name))


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map every parameter name to the first name of that parameter; a tied parameter has several."""
    first: dict[nn.Parameter, str] = {}
    return {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}


def row_orders(model: nn.Module) -> dict[str, Tensor]:
    """The order of rows of fused weights that tensor parallelism reordered, by parameter name."""
    orders: dict[str, Tensor] = {}
    module: Any
    for prefix, module in model.named_modules():
        ranks = getattr(module, "tp_ranks", 1)
        if ranks > 1 and len(getattr(module, "fused_rows", ())) > 1:
            order = row_order(module.fused_rows, ranks)
            orders |= {f"{prefix}.{name}": order for name, _ in module.named_parameters(recurse=False)}
    return orders
