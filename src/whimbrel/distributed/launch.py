"""Start the processes of a run on this machine with torch elastic, as `torchrun --standalone` does."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from whimbrel.base.errors import ConfigError

__all__ = ["default_processes", "launch"]

SHUTDOWN_SECONDS = 600
"""How long workers may take to save after a signal before they are killed."""


def default_processes() -> int:
    """One process per visible GPU; 1 without GPUs."""
    import torch

    return max(1, torch.cuda.device_count())


def launch(processes: int, arguments: Sequence[str], *, max_restarts: int = 0) -> int:
    """Run `whimbrel ARGUMENTS` in local processes; returns 0, or the exit code of the first process that failed.

    Each failure restarts all processes, up to `max_restarts` times; they resume from the newest checkpoint.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if processes < 1:
        raise ConfigError(f"expected --nproc of at least 1, got {processes}")
    # Processes that share a CPU would slow each other down with one thread per core each.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    options: dict[str, Any] = {
        "min_nodes": 1, "max_nodes": 1, "nproc_per_node": processes, "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": max_restarts,
        "logs_specs": DefaultLogsSpecs(),
    }  # fmt: skip
    if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:  # added in torch 2.12
        options["shutdown_timeout"] = SHUTDOWN_SECONDS
    try:
        elastic_launch(LaunchConfig(**options), sys.executable)("-m", "whimbrel", *arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as received:
        return 128 + int(received.sigval)
    return 0
