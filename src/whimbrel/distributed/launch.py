"""Start the processes of a run on this machine with torch elastic, as `torchrun --standalone` does."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from whimbrel.base.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["default_processes", "launch"]

logger = logging.getLogger(__name__)

COMMAND = ("-m", "whimbrel")
"""What Python runs in each process."""
FORWARDED = (signal.SIGTERM, signal.SIGINT)
"""Signals that the processes handle: they save and stop."""
ENDING = "SIGHUP,SIGQUIT"
"""Signals that torch elastic handles itself, by killing the processes."""


def default_processes(device: str | None) -> int:
    """One process per visible GPU; 1 without GPUs, or if a device other than `cuda` is configured."""
    import torch

    return max(1, torch.cuda.device_count()) if device in (None, "cuda") else 1


def launch(processes: int, arguments: Sequence[str], *, max_restarts: int = 0) -> tuple[int, signal.Signals | None]:
    """Run `whimbrel ARGUMENTS` in local processes; returns the exit code and the signal that stopped them, if any.

    The code comes from the first process that failed. Each failure restarts all processes, up to `max_restarts` times;
    they resume from the newest checkpoint.
    """
    import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    for name, value, minimum in (("nproc", processes, 1), ("max-restarts", max_restarts, 0)):
        if value < minimum:
            raise ConfigError(f"expected --{name} of at least {minimum}, got {value}")
    _silence_elastic()
    # Avoid oversubscription: the default is one thread per core in every process.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ENDING
    parameters = RendezvousParameters(
        backend="c10d", endpoint="localhost:0", run_id=uuid.uuid4().hex, min_nodes=1, max_nodes=1,
        local_addr="localhost", is_host=True,
    )  # fmt: skip
    handler = rendezvous_registry.get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        role="default", local_world_size=processes, rdzv_handler=handler, entrypoint=sys.executable,
        args=(*COMMAND, *arguments), max_restarts=max_restarts, local_addr="localhost",
    )  # fmt: skip
    agent = LocalElasticAgent(spec, DefaultLogsSpecs())
    try:
        with _forwarding(agent) as received:
            result = agent.run()
    finally:
        handler.shutdown()
    stopped_by = received[0] if received else None
    return _exit_code(list(result.failures.values())) if result.is_failed() else 0, stopped_by


def _exit_code(failures: list[ProcessFailure]) -> int:
    """The exit code of the first failure; a killed process comes first, since it made the others fail."""
    killed = [failure for failure in failures if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM]
    failure = killed[0] if killed else min(failures, key=lambda failure: failure.timestamp)
    if failure.exitcode > 0:
        return failure.exitcode
    name = signal.Signals(-failure.exitcode).name
    logger.error("process %d (pid %d) was killed by %s", failure.local_rank, failure.pid, name)
    return 128 - failure.exitcode


@contextlib.contextmanager
def _forwarding(agent: LocalElasticAgent) -> Iterator[list[signal.Signals]]:
    """Forward signals to the processes, and do not restart them afterwards; yields the list of received signals."""
    received: list[signal.Signals] = []

    def forward(number: int, frame: Any) -> None:
        del frame
        received.append(signal.Signals(number))
        agent._remaining_restarts = 0
        pids = [worker.id for worker in agent.get_worker_group().workers if worker.id is not None]
        if not pids:
            raise SystemExit(128 + number)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield received
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _silence_elastic() -> None:
    """Hide the messages of torch elastic: the processes report their errors themselves."""
    for name, found in logging.root.manager.loggerDict.items():
        if name.startswith("torch.distributed") and isinstance(found, logging.Logger):
            found.setLevel(logging.CRITICAL + 1)
