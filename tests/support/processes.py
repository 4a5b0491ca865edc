"""A distributed run in other processes: start it, find its workers, read its log, and check that nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from whimbrel.train import read_log

MARK = "WHIMBREL_TEST_FOLDER"
"""Environment variable by which the processes of a run are found."""
PATIENCE = 600
"""Seconds after which a test gives up: many times what a slow machine needs."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
"""Followed by options; `free_endpoint` is an address for --rdzv-endpoint."""
RECIPE = """
output_dir = "run"
[model]
context_length = 16
vocab_size = 300
num_layers = 1
embd_size = 16
num_heads = 2
[data]
path = "shards"
[train]
steps = {steps}
tokens_per_step = 64
micro_batch = 1
device = "cpu"
[schedule]
name = "constant"
[validation]
every = "none"
at_end = false
[checkpoint]
every = {every}
keep = 2
[parallel]
timeout = {timeout}
"""


def free_endpoint() -> str:
    """An address of this machine where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


class DistributedRun:
    """Processes that train in `folder`; their output is in `folder/output.txt`."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.log, self.output = folder, folder / "run" / "log.jsonl", folder / "output.txt"
        self._environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: str(folder), **environment,
        }  # fmt: skip
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(self, *command: object) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            launcher = subprocess.Popen(
                [str(part) for part in command], cwd=self.folder, stdout=output, stderr=output, env=self._environment
            )
        self.launchers.append(launcher)
        return launcher

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def losses(self) -> dict[int, float]:
        """The loss by the number of completed steps; each step is logged once."""
        lines = [line for line in read_log(self.log) if line["kind"] == "step"] if self.log.exists() else []
        found = {line["after"]: line["loss"] for line in lines}
        assert len(found) == len(lines), "a step is logged twice"
        return found

    def starts(self) -> int:
        """How often the processes were started."""
        return self.text().count("Distributed: ")

    def is_stepping(self) -> bool:
        """Whether the current processes have completed a step."""
        return "\nstep:" in self.text().rpartition("Distributed: ")[2]

    def processes(self) -> dict[int, str]:
        """The rank of each living process of the run, or "" for a launcher, by process ID."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                variables = dict(
                    part.partition("=")[::2] for part in (path / "environ").read_bytes().decode().split("\0")
                )
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, UnicodeDecodeError):
                continue
            if variables.get(MARK) == str(self.folder) and state != "Z":
                found[int(path.name)] = variables.get("RANK", "")
        return found

    def worker(self, rank: int) -> int:
        """The process ID of a rank."""
        return next(pid for pid, found in sorted(self.processes().items()) if found == str(rank))

    def kill_node(self, launcher: subprocess.Popen[bytes]) -> None:
        """Kill a launcher together with its workers, as if their machine were lost."""
        children = Path(f"/proc/{launcher.pid}/task").glob("*/children")
        workers = [int(pid) for path in children for pid in path.read_text().split()]
        for pid in (launcher.pid, *workers):
            os.kill(pid, signal.SIGKILL)
        launcher.wait()

    def wait(self, condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
        """Wait for a condition while the run is running."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert any(launcher.poll() is None for launcher in self.launchers), f"the run has ended:\n{self.text()}"
            assert time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.1)

    def wait_for_exit(self, timeout: float = PATIENCE) -> int:
        """Wait until all processes have ended. Returns the exit code of the last launcher that was started."""
        try:
            code = self.launchers[-1].wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(self.text()[-3000:]) from error
        deadline = time.monotonic() + PATIENCE / 10
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.processes() == {}, f"processes are left:\n{self.text()[-3000:]}"
        return code

    def kill(self) -> None:
        """End everything, also after a failed test."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()
