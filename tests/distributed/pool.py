"""A pool of processes for tests on several ranks.

Starting Python and importing torch takes seconds, so the processes are forked from one that has done it, and a test
module starts them once. Jobs with the same number of ranks in a row also share their process group and device meshes.
"""

from __future__ import annotations

import functools
import gc
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

TIMEOUT = 600
"""Seconds until a collective operation fails, and until a job is given up: many times what a slow machine needs."""
PRELOADED = ("whimbrel.train.trainer", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch._dynamo")


class RankError(AssertionError):
    """A job raised on one rank."""


class Pool:
    """Runs functions on `world_size` gloo ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._jobs = folder, 0
        self._workers: list[tuple[mp.Process, Connection]] = []
        self._groups: list[str] = []
        """The store of the process group that each worker is in."""

    def run(self, world_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `job(*args)` on every rank with torch.distributed initialized; returns the results by rank.

        `job` is a function of a module. Raises RankError with the traceback of the first rank that failed.
        """
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED])
        while len(self._workers) < world_size:
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there,), daemon=True)
            process.start()
            self._workers.append((process, here))
            self._groups.append("")
        self._jobs += 1
        workers, store = self._workers[:world_size], self._groups[0]
        if [index for index, group in enumerate(self._groups) if group == store] != list(
            range(world_size)
        ) or not store:
            store = str(self._folder / f"store-{self._jobs}")
        self._groups[:world_size] = [store] * world_size
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((store, rank, world_size, job, args))
        results: dict[int, Any] = {}
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        while len(results) < world_size:
            ready = wait([pipe for pipe, rank in ranks.items() if rank not in results], TIMEOUT)
            if not ready:
                self.close()
                raise RankError(f"ranks {sorted(set(range(world_size)) - results.keys())} hang")
            for pipe in ready:
                rank = ranks[pipe]  # type: ignore[index]
                error, results[rank] = pipe.recv()  # type: ignore[union-attr]
                if error is not None:
                    self.close()  # other ranks may wait for this one
                    raise RankError(f"rank {rank}:\n{error}")
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End the processes; the next job starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers, self._groups = [], []


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    current = None
    while True:
        try:
            store, rank, world_size, job, args = pipe.recv()
        except EOFError:
            return
        try:
            if store != current:
                _join(store, rank, world_size)
                current = store
            result = job(*args)
            dist.barrier()
        except Exception:
            pipe.send((traceback.format_exc(), None))
        else:
            pipe.send((None, result))


def _join(store: str, rank: int, world_size: int) -> None:
    _leave()
    file_store = dist.FileStore(store, world_size)
    dist.init_process_group(
        "gloo", store=file_store, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT)
    )


def _leave() -> None:
    """Leave and free the process groups, which the caches of DTensor keep together with their device meshes."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    for item in gc.get_objects():
        if type(item) is functools._lru_cache_wrapper and item.__module__.startswith(("torch.distributed", "whimbrel")):
            item.cache_clear()
    _clear_sharding_prop_cache()
    gc.collect()
