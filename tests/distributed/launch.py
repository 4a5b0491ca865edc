"""Start gloo ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from whimbrel.base.errors import WhimbrelError

RANKS = 2


def launch(worker: Callable[..., None], *arguments: Any) -> None:
    """Run `worker(rank, port, *arguments)` in RANKS processes, and raise the error of one that fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (port, *arguments), nprocs=RANKS)


@contextmanager
def process_group(rank: int, port: int) -> Iterator[None]:
    """The default process group; it ends when all ranks are done."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    yield
    dist.barrier()
    dist.destroy_process_group()


def error_of(call: Callable[[], Any]) -> str:
    """The error that the call raises, as `Type: message`, or "no error"."""
    try:
        call()
    except WhimbrelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
