"""Parameters whose first dimension is shared out over ranks, as by FSDP2: what is here, and what all have together.

Rows of a matrix stay where they are. R = G Q needs those of no other rank; what does need all of them, the search for
a basis above all, is a sum over rows, so a sum over ranks of something small, and every rank goes on from the same
bits. The matrices of a stack stay whole, so that almost nothing about them is for other ranks to know.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from whimbrel.base.errors import OptimizerError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Shard",
    "add_up",
    "all_true",
    "copy_",
    "draw",
    "gather",
    "is_shared_out",
    "local",
    "mean",
    "shard_of",
    "total",
]


class Shard:
    """The part of a parameter that is on this rank: `each` rank has so many of the `size` of its first dimension.

    The last ones may have fewer, or none.
    """

    def __init__(self, parameter: DTensor) -> None:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor import Shard as Split

        self.mesh, self.placements = parameter.device_mesh, parameter.placements
        split = [dim for dim, placement in enumerate(self.placements) if not isinstance(placement, Replicate)]
        if len(split) != 1 or self.placements[split[0]] != Split(0):
            raise OptimizerError(
                f"a parameter of shape {tuple(parameter.shape)} is shared out as {self.placements}: share out its "
                "first dimension over one dimension of the mesh, as fully_shard(model) does"
            )
        self.group = self.mesh.get_group(split[0])
        self.size, self.stacked = parameter.shape[0], parameter.ndim == 3
        self.each = -(-self.size // self.mesh.size(split[0]))
        self.start = min(self.size, self.each * self.mesh.get_local_rank(split[0]))

    def whole(self, shape: Sequence[int]) -> torch.Size:
        """The shape of all parts together, of which this is one's."""
        return torch.Size((self.size, *shape[1:]))

    def take(self, tensor: Tensor, count: int) -> Tensor:
        """Of a tensor that is whole, the `count` first indices that are here."""
        return tensor[self.start : self.start + count]

    def wrap(self, tensor: Tensor, block: int = 1) -> Tensor:
        """A part as a tensor that is shared out like the parameter, so that checkpoints can share it out anew.

        It has one first index for each of the parameter's, or for each `block` of them.
        """
        from torch.distributed.tensor import DTensor

        whole = torch.empty((-(-self.size // block), *tensor.shape[1:]), device="meta")
        return DTensor.from_local(tensor, self.mesh, self.placements, shape=whole.shape, stride=whole.stride())


def is_shared_out(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether other ranks have parts of a tensor. The module of such tensors is slow to import: none made it, none."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shard_of(parameter: Tensor) -> Shard | None:
    """What of a parameter is here; None where all of it is."""
    return Shard(parameter) if is_shared_out(parameter) else None


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is here."""
    return tensor.to_local() if is_shared_out(tensor) else tensor


def copy_(own: Tensor, saved: Tensor) -> None:
    """Copy a tensor into another, either of them whole or shared out."""
    if is_shared_out(own) == is_shared_out(saved):
        own.copy_(saved)
    elif is_shared_out(own):
        here = own.to_local()
        here.copy_(Shard(own).take(saved, here.shape[0]))
    elif is_shared_out(saved):
        own.copy_(saved.full_tensor())


def draw(size: Sequence[int], generator: torch.Generator, device: torch.device, shard: Shard | None = None) -> Tensor:
    """Gaussian numbers; for a shard, its part of those that the whole would get."""
    if shard is None:
        return torch.randn(tuple(size), generator=generator, device=device, dtype=torch.float32)
    return shard.take(draw(shard.whole(size), generator, device), size[0])


def add_up(tensor: Tensor, shard: Shard | None) -> Tensor:
    """The sum over all rows of a matrix, from that over the rows of each rank."""
    return tensor if shard is None or shard.stacked else _sum(tensor, shard)


def mean(values: Tensor, shard: Shard | None) -> Tensor:
    """The mean over all matrices of a stack, of one value for each; of a lone matrix, its value."""
    if shard is None or not shard.stacked:
        return values.float().mean()
    return _sum(values.float().sum(), shard) / shard.size


def gather(tensor: Tensor, shard: Shard | None) -> Tensor:
    """All rows of a matrix, on every rank."""
    if shard is None or shard.stacked:
        return tensor
    whole = shard.wrap(tensor)
    assert is_shared_out(whole)
    return whole.full_tensor()


def all_true(here: Tensor, shards: Iterable[Shard | None]) -> bool:
    """Whether something is true on all ranks that have parts of these parameters; on all of them the same answer."""
    false = (~here).float()
    for shard in {shard.group: shard for shard in shards if shard is not None}.values():
        false = _sum(false, shard)
    return not bool(false)


def total(values: Iterable[tuple[Tensor, Shard | None]]) -> Tensor:
    """The sum of numbers, each from a part of its parameter, over all parts."""
    here: dict[Any, list[Tensor]] = {}
    shards = {}
    for value, shard in values:
        group = None if shard is None else shard.group
        shards[group] = shard
        here.setdefault(group, []).append(value)
    device = next(iter(here.values()))[0].device
    sums = {group: torch.stack([value.to(device) for value in found]).sum() for group, found in here.items()}
    return torch.stack(
        [value if (of := shards[group]) is None else _sum(value, of) for group, value in sums.items()]
    ).sum()


def _sum(tensor: Tensor, shard: Shard) -> Tensor:
    total = tensor.contiguous()
    dist.all_reduce(total, group=shard.group)
    return total
