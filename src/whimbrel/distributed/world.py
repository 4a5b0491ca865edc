"""The processes of a run: start and end of torch.distributed, ranks, the device mesh, and small collectives."""

from __future__ import annotations

import atexit
import copy
import functools
import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from whimbrel.base.errors import ConfigError, ParallelError, WhimbrelError, WriteError
from whimbrel.distributed.failure import leave, meet, report_uncaught_exceptions, watch_peers
from whimbrel.distributed.layout import SIZES, Layout, ParallelConfig, resolve_layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["World", "join_world", "launched_processes"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Set by torchrun for every process."""
START_SECONDS = 120.0
"""Minimum rendezvous timeout: processes may start this far apart, even if `parallel.timeout` is shorter."""


class World:
    """This process and its peers. In a single process (rank 0 of 1), all collectives are no-ops."""

    def __init__(
        self,
        layout: Layout | None = None,
        mesh: DeviceMesh | None = None,
        *,
        independent: bool = False,
        timeout: float = ParallelConfig().timeout,
    ) -> None:
        self.layout, self.mesh, self.timeout = layout or Layout(), mesh, timeout
        self.independent = independent
        """Whether data ranks train on their own gradients (DiLoCo) instead of the global batch's."""
        self.rank: int = 0 if mesh is None else dist.get_rank()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank)) if mesh is not None else 0
        self.node = int(os.environ.get("GROUP_RANK", self._node_of_rank())) if mesh is not None else 0
        self._group: dist.ProcessGroup | None = None
        self.dp_rank, self.dp_size = 0, self.layout.dp
        self.dp_group: dist.ProcessGroup | None = None
        if mesh is not None:
            data = mesh["dp_replicate", "dp_shard"]._flatten("dp")
            self.dp_rank, self.dp_group = data.get_local_rank(), data.get_group()
        if mesh is not None and self.size > 1 and dist.get_backend() != "fake":
            for group in self.groups().values():
                _set_pg_timeout(timedelta(seconds=timeout), group)

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.layout.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs, runs callbacks and writes files."""
        return self.rank == 0

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that have copies of all parameters and average their gradients (DDP); None if there are none."""
        replicated = self.layout.dp_replicate > 1 and self.layout.dp_shard == self.layout.tp == 1
        return self.dp_group if replicated and not self.independent else None

    def all_reduce_dp(self, value: Tensor) -> Tensor:
        """Sum over the ranks that read different data."""
        if self.dp_group is not None and self.dp_size > 1:
            value = value.clone()
            dist.all_reduce(value, group=self.dp_group)
        return value

    def loss_divisor(self, count: Tensor) -> Tensor:
        """The divisor of each rank's loss for which the averaged gradient is the gradient of the global batch."""
        if self.dp_size == 1 or self.independent:
            return count.clamp(min=1)
        return self.all_reduce_dp(count).clamp(min=1) / self.dp_size

    def all_reduce_dp_int(self, value: int) -> int:
        """Sum a number over the ranks that read different data."""
        if self.dp_size == 1:
            return value
        total = torch.tensor(value)
        dist.all_reduce(total, group=self.dp_group)
        return int(total)

    def with_own_group(self) -> World:
        """The same ranks with their own gloo group, for a background thread that communicates during training."""
        world = copy.copy(self)
        if self.size > 1:
            assert dist.group.WORLD is not None
            world._group = _background_group(dist.group.WORLD, self.timeout)
        return world

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """The process groups of this rank by mesh dimension, and "dp" for all ranks that read different data."""
        if self.mesh is None or self.dp_group is None:
            return {}
        return {name: self.mesh.get_group(name) for name in SIZES} | {"dp": self.dp_group}

    def all_gather_dp(self, value: T) -> list[T]:
        """The values of the ranks that read different data, in order, on every rank."""
        if self.dp_size == 1:
            return [value]
        values: list[Any] = [None] * self.dp_size
        dist.all_gather_object(values, value, group=self.dp_group)
        return values

    def broadcast(self, value: T) -> T:
        """The value of rank 0, on every rank."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        result: T = values[0]
        return result

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all ranks, in order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def run(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and gather the results. If it raises on one rank, every rank raises that error.

        The message names the rank.
        """
        if self.size == 1:
            return [action()]
        value, cause = None, None
        try:
            value = action()
        except Exception as error:
            cause = error
        outcomes = self.all_gather_object((value, None if cause is None else _portable(cause)))
        for rank, (_, failed) in enumerate(outcomes):
            if failed is not None:
                error_class, message = failed
                raise error_class(f"rank {rank}: {message}") from (cause if rank == self.rank else None)
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def send_to_main(self, tensor: Tensor, rank: int, shape: Sequence[int]) -> Tensor | None:
        """Send the tensor of `rank`, which has this shape and is in host memory, to rank 0; other ranks get None."""
        if rank == self.rank == 0:
            return tensor
        if rank == self.rank:
            dist.send(tensor.contiguous().view(-1).view(torch.uint8), 0, self._group)
        elif self.is_main:
            received = torch.empty(shape, dtype=tensor.dtype)
            dist.recv(received.view(-1).view(torch.uint8), rank, self._group)
            return received
        return None

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_gather_object(None)

    def agree(self, flags: Sequence[bool], number: int) -> tuple[list[bool], int]:
        """The flags of rank 0, and the largest number of any rank."""
        if self.size == 1:
            return list(flags), number
        mine = torch.tensor([*map(int, flags if self.is_main else [False] * len(flags)), number])
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        *agreed, number = mine.tolist()
        return [bool(flag) for flag in agreed], number

    def run_on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result on every rank. If it raises, every rank raises an error."""
        outcome: tuple[Any, Any] = (None, None)
        if self.is_main:
            try:
                outcome = action(), None
            except Exception as error:
                self.broadcast((None, _portable(error)))
                raise
        result, failure = self.broadcast(outcome)
        if failure is not None:
            error_class, message = failure
            raise error_class(message)
        return result  # type: ignore[no-any-return]

    def _node_of_rank(self) -> int:
        return self.rank // int(os.environ.get("LOCAL_WORLD_SIZE", self.size))


def _portable(error: Exception) -> tuple[type[WhimbrelError], str]:
    """The class and message of an error, to be raised on other ranks."""
    if isinstance(error, WhimbrelError):
        return next(cls for cls in type(error).__mro__ if "__init__" not in cls.__dict__), str(error)
    if isinstance(error, OSError):
        return WriteError, str(error)
    return ParallelError, f"{type(error).__name__}: {error}"


def launched_processes() -> int:
    """Number of processes according to the environment of torchrun; 1 without it."""
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdigit() or int(size) < 1:
        raise ConfigError(f"expected a number of processes in WORLD_SIZE, got '{size}': start with torchrun or --nproc")
    if int(size) > 1 and (missing := [name for name in LAUNCH_VARIABLES if name not in os.environ]):
        raise ConfigError(
            f"WORLD_SIZE={size}, but {', '.join(missing)} not set: start with torchrun or --nproc, or unset WORLD_SIZE"
        )
    return int(size)


def join_world(config: ParallelConfig, device_type: str) -> World:
    """Initialize torch.distributed for the processes that torchrun or `--nproc` started; destroyed at exit.

    Without `[parallel]` settings and other processes, nothing is initialized.
    """
    size = dist.get_world_size() if dist.is_initialized() else launched_processes()
    if size == 1 and config == ParallelConfig():
        return World()
    layout = resolve_layout(config, size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    joined = not dist.is_initialized()
    if joined:
        _init_process_group(config, device_type, size)
        atexit.register(leave)
    assert dist.group.WORLD is not None
    mesh = _device_mesh(device_type, layout, dist.group.WORLD)
    world = World(layout, mesh, independent=config.strategy == "diloco", timeout=config.timeout)
    if joined and size > 1 and world.is_main:
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        logger.info(
            "Distributed: %s over %d processes (%s), %s, %s%s",
            _strategy_name(config, layout), size, layout, "nccl" if device_type == "cuda" else "gloo", device_type,
            "" if restart == "0" else f", restart {restart}",
        )  # fmt: skip
    return world


def _strategy_name(config: ParallelConfig, layout: Layout) -> str:
    """The configured strategy; if only sizes are set, the dimensions in use."""
    names = {"dp_replicate": "ddp", "dp_shard": "fsdp"}
    used = [names.get(name, name) for name in SIZES if getattr(layout, name) > 1]
    return config.strategy or " x ".join(used)


@functools.lru_cache(maxsize=8)
def _device_mesh(device_type: str, layout: Layout, _group: dist.ProcessGroup) -> DeviceMesh:
    """The mesh of a layout over a process group; cached, because every mesh opens new connections and threads."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, tuple(getattr(layout, name) for name in SIZES), mesh_dim_names=SIZES)


@functools.lru_cache(maxsize=8)
def _background_group(_group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    """A second group of all processes; cached like the mesh."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return group


def _init_process_group(config: ParallelConfig, device_type: str, size: int) -> None:
    """Initialize torch.distributed: NCCL between GPUs, and gloo for tensors in host memory."""
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.timeout)
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank = int(os.environ["RANK"])
    try:
        patience = max(config.timeout, START_SECONDS)
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=patience)))
        name = meet(store, rank, size, patience)
        watch_peers(name, rank, config.timeout)
        store = PrefixStore(name, store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        report_uncaught_exceptions()
    except (ValueError, RuntimeError) as error:
        if isinstance(error, ParallelError):
            raise
        reason = " ".join(str(error).split())
        raise ParallelError(f"cannot connect {size} processes: {reason}") from error
