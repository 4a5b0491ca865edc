"""Ranks that each hold a whole model, as under DDP: what they average, and whether they still agree.

Every rank makes the same step from the same averages: bases, moments and what is drawn by chance come out the same, bit
for bit, without being sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from whimbrel.base.errors import ParallelError
from whimbrel.optim.shards import is_shared_out

__all__ = ["are_replicated", "average_", "check_replicas"]


def are_replicated(params: Iterable[Tensor]) -> bool:
    """Whether other ranks may have copies of some of these parameters."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several and not all(is_shared_out(parameter) for parameter in params)


def average_(tensors: Sequence[Tensor], here: Sequence[bool], group: dist.ProcessGroup) -> list[bool]:
    """The means over the ranks of a group, in place; and which of them are of anything.

    `here` says whether a tensor is of something on this rank, and not but zeros. The device is waited for only where
    one is not.
    """
    anywhere = torch.tensor(here, dtype=torch.int32, device=tensors[0].device)
    torch._foreach_div_(list(tensors), dist.get_world_size(group))
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in (anywhere, *tensors)]:
        assert work is not None
        work.wait()
    return list(here) if all(here) else anywhere.bool().tolist()


def check_replicas(optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | None = None) -> None:
    """Refuse ranks that have drifted apart: weights and their state, bases above all, must be the same bits on all.

    What is shared out over ranks is left out. Everything is read, so this is for every now and then.
    """
    own = _digests(optimizer)
    found: list[dict[str, str]] = [own] * dist.get_world_size(process_group)
    dist.all_gather_object(found, own, group=process_group)
    for rank, other in enumerate(found):
        odd = sorted(name for name in found[0].keys() | other.keys() if found[0].get(name) != other.get(name))
        if odd:
            raise ParallelError(
                f"the {odd[0]} on rank {rank} is not that of rank 0: average gradients over all ranks before every "
                "step, and go on from the last checkpoint"
            )


def _digests(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A digest of every weight, and of every tensor of its state, by what they are called."""
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("names") or group.get("param_names") or range(len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            of = f"of {name}" if isinstance(name, str) else f"of parameter {name} of group {number}"
            for kind, tensor in {"weight": parameter.detach(), **optimizer.state.get(parameter, {})}.items():
                if isinstance(tensor, Tensor) and not is_shared_out(tensor):
                    numbers = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                    found[f"{kind} {of}"] = hashlib.sha256(numbers).hexdigest()
    return found
