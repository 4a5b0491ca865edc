"""Directory locks: one process at a time, released when it dies."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whimbrel.base import lock as lock_module
from whimbrel.base.errors import ConfigError, WriteError
from whimbrel.base.lock import DirectoryLock, lock_owner

HOLDER = """
import sys, time
from whimbrel.base.lock import DirectoryLock
with DirectoryLock(sys.argv[1]):
    print("ready", flush=True)
    time.sleep(600)
"""
FORKER = """
import os, sys, time
from whimbrel.base.lock import DirectoryLock
with DirectoryLock(sys.argv[1]):
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # the child itself, which has dropped the lock by now
        time.sleep(600)
        os._exit(0)
    time.sleep(600)
"""


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_second_process_is_rejected_with_pid_and_host(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start(HOLDER, folder) as holder:
        try:
            assert first_line(holder) == "ready"
            message = f"{folder} is in use by process {holder.pid} on {socket.gethostname()}: stop it first"
            with pytest.raises(ConfigError, match=message):
                DirectoryLock(folder).acquire()
        finally:
            holder.kill()
    with DirectoryLock(folder):  # the lock of a killed process is released
        assert (lock_owner(folder) or {})["pid"] == os.getpid()
    assert lock_owner(folder) is None


def test_two_instances_exclude_each_other_in_one_process(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        DirectoryLock(tmp_path).acquire()
    with DirectoryLock(tmp_path):
        pass


def test_lock_is_reentrant_and_can_be_released_by_another_thread(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.acquire()
    thread = threading.Thread(target=lock.release)
    thread.start()
    thread.join()
    with pytest.raises(ConfigError, match="in use"):
        DirectoryLock(tmp_path).acquire()
    lock.release()
    with DirectoryLock(tmp_path):
        pass


def test_forked_child_does_not_keep_the_lock_of_a_killed_parent(tmp_path: Path) -> None:
    """A DataLoader worker outlives a killed run by seconds."""
    with start(FORKER, tmp_path) as parent:
        child = int(first_line(parent))
        parent.kill()
    try:
        os.kill(child, 0)  # is still there
        with DirectoryLock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def no_flock(code: int) -> Any:
    def fail(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    return SimpleNamespace(flock=fail, LOCK_EX=2, LOCK_NB=4)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_flock_the_owner_recorded_in_the_lock_file_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    monkeypatch.setattr(lock_module, "flock", no_flock(code))
    with DirectoryLock(tmp_path):
        assert f"{tmp_path} cannot be locked ({os.strerror(code)})" in caplog.text
        with pytest.raises(ConfigError, match=r"in use by process .* remove .*\.lock"):
            DirectoryLock(tmp_path).acquire()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / ".lock").write_text(json.dumps({"pid": dead.pid, "host": socket.gethostname()}))
    with DirectoryLock(tmp_path):  # its owner was killed
        pass


def test_locks_local_to_a_host_respect_owners_on_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock_module, "_locks_are_local", lambda directory: True)
    with DirectoryLock(tmp_path):
        assert "are not shared between hosts" in caplog.text
    (tmp_path / ".lock").write_text(json.dumps({"pid": 7, "host": "other.example"}))
    with pytest.raises(ConfigError, match=r"process 7 on other\.example.*remove"):
        DirectoryLock(tmp_path).acquire()
    assert lock_owner(tmp_path) == {"pid": 7, "host": "other.example"}


def test_mount_options_are_those_of_the_innermost_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b" / "c").mkdir(parents=True)
    root = str(tmp_path).replace(" ", "\\040")
    lines = [
        "1 0 0:1 / / rw,relatime shared:1 - ext4 /dev/sda rw",
        f"2 1 0:2 / {root}/a\\040b rw shared:2 - nfs4 server:/x rw,vers=3,local_lock=all",
        f"3 2 0:3 / {root}/a\\040b/c rw shared:3 - nfs4 server:/y rw,local_lock=none",
    ]
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda self, **how: "\n".join(lines) if str(self) == "/proc/self/mountinfo" else read(self, **how),
    )
    assert [lock_module._locks_are_local(tmp_path / name) for name in (".", "a b", "a b/c")] == [False, True, False]


def test_unwritable_directory_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"cannot write .*below"):
        DirectoryLock(tmp_path / "file" / "below").acquire()
    with pytest.raises(ConfigError, match="expected a directory, got the file .*file: choose another output_dir"):
        DirectoryLock(tmp_path / "file").acquire()


def test_full_disk_does_not_release_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(lock_module, "OWNER_WAIT_SECONDS", 0.0)
    with DirectoryLock(tmp_path), pytest.raises(ConfigError, match="in use by another process"):
        DirectoryLock(tmp_path).acquire()


def test_unbalanced_release_is_an_error_and_the_lock_still_works(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    with pytest.raises(RuntimeError, match="more often than it was acquired"):
        lock.release()
    with lock, pytest.raises(ConfigError, match="in use"):
        DirectoryLock(tmp_path).acquire()


def test_is_alive_accepts_only_pids_of_running_processes() -> None:
    assert lock_module.is_alive(os.getpid())
    for pid in (None, "1", 0, -1, 2**40, 2**70):
        assert not lock_module.is_alive(pid)
