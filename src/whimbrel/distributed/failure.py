"""Fail together: the first error is printed once, and all ranks exit with its code.

A failing rank records its error in a store that every rank polls in a thread. The other ranks usually fail in their
next collective; a rank that hangs in one (NCCL does not detect a dead peer) is killed after a grace period.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from whimbrel.base.errors import ParallelError, WhimbrelError

__all__ = [
    "end_process",
    "explain",
    "leave",
    "meet",
    "rank_prefix",
    "report_failure",
    "report_uncaught_exceptions",
    "watch_peers",
]

POLL_SECONDS = 0.5
GRACE_SECONDS = 10.0
"""How long a rank may take to exit on its own after another has failed."""
FIRST_SECONDS = 0.5
"""How long other ranks let rank 0 report an error that all have in common, such as an invalid setting."""
LOST_SECONDS = 2.0
"""How long a rank that lost a connection waits for the error of the rank that ended."""
CONNECT_SECONDS = 5.0
EXIT_SECONDS, MAX_EXIT_SECONDS = 0.2, 5.0
"""Time for communication threads to free their last tensors; after Python's exit they would abort the process. On a
busy machine, they may need more until they are scheduled."""

LOST = re.compile(r"closed by peer|reset by peer|broken pipe|connection refused|socket closed|remote process", re.I)
TIMED_OUT = re.compile(r"timed out waiting \d+ ?ms|wait timeout after|collective operation timeout", re.I)


class Watch:
    """Polls the store for a failure of another rank, in a thread."""

    def __init__(self, store: Store, rank: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.is_first = True
        """Whether no rank failed before this one did."""
        self._store, self._parent = store, os.getppid()
        self._error: Exception | None = None
        self._code = 1
        self._ended = threading.Event()
        self._kills = False  # whether the thread will end this process after the grace period
        self._thread = threading.Thread(target=self._poll, name="whimbrel-watch", daemon=True)
        self._thread.start()

    def report(self, error: Exception) -> int:
        """Record an error of this rank, unless it is recorded; returns the exit code. Sets `is_first`."""
        if self._error is not None:
            return self._code
        self._error, self._code = error, _exit_code(error)
        lost = explain(error) is not error
        if lost:
            _wake_siblings()
        deadline = time.monotonic() + (LOST_SECONDS if lost else FIRST_SECONDS if self.rank else 0.0)
        failure = json.dumps([self.rank, self._code])
        try:
            while time.monotonic() < deadline and not self._store.check(["failed"]):
                time.sleep(0.05)
            first = self._store.compare_set("failed", "", failure).decode()
        except RuntimeError:  # the process that holds the store has ended
            first = failure
        self.is_first, self._code = first == failure, int(json.loads(first)[1])
        return self._code

    def _poll(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            if os.getppid() != self._parent:  # the launcher was killed
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                failed = self._store.check(["failed"])
                code = json.loads(self._store.get("failed"))[1] if failed else 0
            except RuntimeError:
                continue
            if failed:
                break
        else:
            return
        self._kills = True
        time.sleep(GRACE_SECONDS)
        if self._error is not None and self.is_first:
            _print(f"{rank_prefix()}whimbrel: {' '.join(str(self._error).split())}")
        _flush()
        os._exit(code)

    def stop(self) -> None:
        """End the thread: one that is inside the store while Python exits would abort the process."""
        self._ended.set()
        if not self._kills:
            self._thread.join(MAX_EXIT_SECONDS)


_watch: Watch | None = None


def rank_prefix() -> str:
    """`[rank 3] ` on ranks other than 0, for messages."""
    rank = os.environ.get("RANK", "0")
    return f"[rank {rank}] " if rank.isdigit() and int(rank) else ""


def explain(error: Exception) -> Exception:
    """`error`, or a ParallelError if its cause is a lost or hung rank."""
    if _watch is None or not isinstance(error, RuntimeError) or isinstance(error, WhimbrelError):
        return error
    text = " ".join(str(error).split())
    if TIMED_OUT.search(text):
        limit = f"parallel.timeout = {_watch.timeout:g} s"
        return ParallelError(f"a collective timed out after {limit}: another rank hangs, or the network is too slow")
    if LOST.search(text):
        return ParallelError("lost the connection to another rank: it exited, or the network failed")
    return error


def report_failure(error: Exception) -> tuple[bool, int]:
    """Tell the other ranks about an error: whether to print it (no other rank failed before), and the exit code.

    Before the ranks are connected, one of those with the same error prints it.
    """
    if _watch is not None:
        code = _watch.report(error)
        return _watch.is_first, code
    code = _exit_code(error)
    if os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True, code
    time.sleep(FIRST_SECONDS if rank_prefix() else 0.0)
    digest = hashlib.sha256(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT')} {error}".encode()).hexdigest()
    try:
        return _connect(CONNECT_SECONDS).add(f"whimbrel/{digest}", 1) == 1, code
    except RuntimeError:
        return True, code


def end_process(code: int) -> None:
    """Exit. With several processes, skip Python's finalization: it can abort or hang in communication threads."""
    if _watch is not None:
        _watch.stop()
        atexit._run_exitfuncs()
        _flush()
        os._exit(code)
    sys.exit(code)


def watch_peers(store_prefix: str, rank: int, timeout: float) -> None:
    """Start to watch the other ranks."""
    global _watch
    _watch = Watch(PrefixStore(f"whimbrel/{store_prefix}", _connect(CONNECT_SECONDS)), rank, timeout)


def report_uncaught_exceptions() -> None:
    """Report uncaught exceptions to the other ranks; call it after init_process_group.

    torch's own hook, which adds the rank, prints what the hook before it wrote: ours exits, so it has to be outermost.
    """
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        prints, code = report_failure(error) if isinstance(error, Exception) else (True, 1)
        if prints:
            previous(kind, error, trace)
        else:
            _print(f"{rank_prefix()}stopped, because another rank failed")
        _flush()
        os._exit(code)

    sys.excepthook = report


def meet(store: Store, rank: int, size: int, timeout: float) -> str:
    """Wait for all ranks and return an id of this start or restart, the same on all ranks.

    torch elastic keeps the store across restarts, so it still has the keys of earlier starts. Each rank therefore posts
    a nonce, and rank 0 replies with the id under that nonce.
    """
    prefix, deadline = "whimbrel/meet", time.monotonic() + timeout
    if rank:
        number = uuid.uuid4().hex
        store.set(f"{prefix}/hello/{rank}", number)
        store.wait([f"{prefix}/name/{number}"], timedelta(seconds=timeout))
        name: str = store.get(f"{prefix}/name/{number}").decode()
        store.set(f"{prefix}/ready/{name}/{rank}", "")
        return name
    name, missing, answered = uuid.uuid4().hex, set(range(1, size)), set[bytes]()
    while missing and time.monotonic() < deadline:
        for other in sorted(missing):
            if store.check([f"{prefix}/ready/{name}/{other}"]):
                missing.discard(other)
            elif store.check([f"{prefix}/hello/{other}"]):
                number_of_other = store.get(f"{prefix}/hello/{other}")
                if number_of_other not in answered:
                    answered.add(number_of_other)
                    store.set(f"{prefix}/name/{number_of_other.decode()}", name)
        time.sleep(0.01)
    if missing:
        ranks = ", ".join(map(str, sorted(missing)))
        raise ParallelError(f"expected {size} ranks, got nothing from {ranks} in {timeout:g} s: check their output")
    return name


def leave() -> None:
    """Destroy the process group at exit."""
    if _watch is not None:
        _watch.stop()
        if _watch._error is not None:
            return  # destroying the group would wait for hung collectives
    if dist.is_initialized():
        dist.destroy_process_group()
        start = time.monotonic()
        time.sleep(EXIT_SECONDS)
        while _has_running_threads() and time.monotonic() < start + MAX_EXIT_SECONDS:
            time.sleep(EXIT_SECONDS)


def _has_running_threads() -> bool:
    """Whether a thread other than this one is running, or waiting for a core (on Linux)."""
    own = str(threading.get_native_id())
    for path in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if path.parent.name != own and path.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


def _wake_siblings() -> None:
    """Send SIGCONT to the launcher's other processes: a stopped one (SIGSTOP) could not react to SIGTERM."""
    for path in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in path.read_text().split():
                os.kill(int(pid), signal.SIGCONT)


def _connect(timeout: float) -> TCPStore:
    """A separate connection: a thread that waits for a key blocks all others on the same connection."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))


def _exit_code(error: Exception) -> int:
    return 2 if isinstance(explain(error), WhimbrelError | OSError) else 1


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
