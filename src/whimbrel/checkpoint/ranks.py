"""The processes of a run, as far as a checkpoint needs to know them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from whimbrel.base.errors import CheckpointError, WriteError

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """This process among all: over torch.distributed where it has been initialised, else alone."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if together else 0
        self.world_size: int = dist.get_world_size() if together else 1
        self.local_rank: int = int(os.environ.get("LOCAL_RANK", self.rank)) if together else 0
        self.node: int = self.rank // int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)) if together else 0

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of `source`, on every rank."""
        if self.world_size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=source)
        result: T = values[0]
        return result

    def barrier(self) -> None:
        """Wait for all."""
        if self.world_size > 1:
            dist.barrier()

    def together(self, action: Callable[[], T]) -> list[T]:
        """What `action` gives on every rank; where it fails on one, it fails on all, with the same error."""
        if self.world_size == 1:
            return [action()]
        value, fault = None, None
        try:
            value = action()
        except Exception as error:
            fault = (isinstance(error, OSError), str(error))
        outcomes = self.gather((value, fault))
        for rank, (_, failed) in enumerate(outcomes):
            if failed is not None:
                kind = WriteError if failed[0] else CheckpointError
                raise kind(f"rank {rank}: {failed[1]}")
        return [given for given, _ in outcomes]  # type: ignore[misc]

    def leader(self, group: Any) -> int:
        """The lowest rank of a process group; alone, this one."""
        return 0 if self.world_size == 1 else min(dist.get_process_group_ranks(group))
