"""Lock a directory for exclusive use by one process."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
import weakref
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from whimbrel.base.errors import ConfigError, WriteError

flock: ModuleType | None
try:
    import fcntl as flock
except ImportError:  # Windows
    flock = None

__all__ = ["DirectoryLock", "is_alive", "lock_owner"]

LOCK_FILE = ".lock"
OWNER_WAIT_SECONDS = 0.5
"""How long to wait for the owner's pid and host in the lock file: they are written just after the lock is taken."""
LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock", "localflock"}
"""Mount options of network file systems (NFS, Lustre) that make `flock` local to one host."""

logger = logging.getLogger(__name__)


class DirectoryLock:
    """Exclusive use of a directory through `flock` on its `.lock` file.

    The kernel releases the lock when the process ends, however it ends; forked children do not inherit it. The file
    names the owner (pid and host) for error messages. After release it stays in the directory, empty: removing it would
    race with a process that is opening it. The lock is reentrant: the last `release` frees it. Two instances exclude
    each other even within one process.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._file: int | None = None
        self._count = 0
        self._guard = threading.Lock()
        _INSTANCES.add(self)

    @property
    def path(self) -> Path:
        """The lock file."""
        return self.directory / LOCK_FILE

    def __enter__(self) -> DirectoryLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock, or raise ConfigError with the pid and host of its holder. Does not block."""
        with self._guard:
            if self._count == 0:
                file = self._open()
                try:
                    self._lock(file)
                except BaseException:
                    os.close(file)
                    raise
                self._file = file
                _write(file, {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%FT%T%z")})
            self._count += 1

    def release(self) -> None:
        """Release the lock, once for each `acquire`."""
        with self._guard:
            if self._count == 0:
                raise RuntimeError(f"released {self.path} more often than it was acquired")
            self._count -= 1
            if self._count == 0 and self._file is not None:
                _write(self._file, None)
                os.close(self._file)
                self._file = None

    def _open(self) -> int:
        if self.directory.is_file():
            raise ConfigError(f"expected a directory, got the file {self.directory}: choose another output_dir")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                return os.open(self.path, os.O_RDWR)
            except FileNotFoundError:
                return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise WriteError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _lock(self, file: int) -> None:
        try:
            if flock is None:
                raise OSError(errno.ENOTSUP, "this system has no flock")
            flock.flock(file, flock.LOCK_EX | flock.LOCK_NB)
        except BlockingIOError as error:
            deadline = time.monotonic() + OWNER_WAIT_SECONDS
            while (owner := lock_owner(self.directory)) is None and time.monotonic() < deadline:
                time.sleep(0.01)
            raise self._in_use_error(owner) from error
        except OSError as error:
            self._check_owner_file(
                f"{self.directory} cannot be locked ({error.strerror}): make sure that no other run uses it"
            )
        else:
            if _locks_are_local(self.directory):
                self._check_owner_file(
                    f"locks in {self.directory} are not shared between hosts: make sure that no other host uses it"
                )

    def _check_owner_file(self, warning: str) -> None:
        """Without reliable locks, rely on the owner in the lock file: raise if it may be alive, otherwise warn."""
        owner = lock_owner(self.directory)
        if owner is not None and (owner.get("host") != socket.gethostname() or is_alive(owner.get("pid"))):
            raise ConfigError(f"{self._in_use_error(owner)}; if that process has ended, remove {self.path}")
        logger.warning(warning)

    def _in_use_error(self, owner: dict[str, Any] | None) -> ConfigError:
        who = "another process" if owner is None else f"process {owner.get('pid')} on {owner.get('host')}"
        return ConfigError(f"{self.directory} is in use by {who}: stop it first, or choose another output_dir")

    def _drop_after_fork(self) -> None:
        """In a forked child: the lock stays with the parent."""
        file, self._file, self._count, self._guard = self._file, None, 0, threading.Lock()
        if file is not None:
            os.close(file)


_INSTANCES: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_INSTANCES):
        lock._drop_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def lock_owner(directory: Path) -> dict[str, Any] | None:
    """The process (`pid`, `host`, `since`) that holds the lock, or was killed while holding it; None after a clean
    exit.
    """
    try:
        owner = json.loads((directory / LOCK_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


def _write(file: int, owner: dict[str, Any] | None) -> None:
    """Write the owner to the lock file. On a full disk the lock still works, but error messages lack the owner."""
    try:
        os.ftruncate(file, 0)
        if owner is not None:
            os.pwrite(file, json.dumps(owner).encode(), 0)
    except OSError as error:
        logger.debug("cannot record the owner of a lock: %s", error)


def is_alive(pid: object) -> bool:
    """Whether this host has a process with the ID `pid`."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it runs as another user
        return True
    return True


def _locks_are_local(directory: Path) -> bool:
    """Whether the directory is on a network file system mounted with host-local locks."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    mount_point, options = "", set[str]()
    resolved = str(directory.resolve())
    for line in lines:
        fields = line.split()
        candidate = fields[4].replace("\\040", " ")
        inside = resolved == candidate or resolved.startswith(candidate.rstrip("/") + "/")
        if inside and len(candidate) >= len(mount_point):
            mount_point, options = candidate, {*fields[5].split(","), *fields[-1].split(",")}
    return not options.isdisjoint(LOCAL_LOCKS)
