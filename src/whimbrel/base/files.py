"""Atomic files and directories: complete or absent, never partly written."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from whimbrel.base.errors import WriteError
from whimbrel.base.lock import is_alive

__all__ = [
    "PARTIAL",
    "atomic_directory",
    "atomic_file",
    "broken_link",
    "cache_directory",
    "check_empty",
    "format_bytes",
    "is_private",
    "parse_json",
    "remove_stale",
    "restore_replaced",
    "sha256_file",
]

PARTIAL = ".partial-"
"""Prefix of the temporary name of a partly written file or directory."""
BACKUP = f"{PARTIAL}replaced-"
"""Prefix of the temporary name of a complete directory that is being replaced."""
_cleaned_directories: set[Path] = set()
HASH_CHUNK = 4 * 2**20
"""Bytes hashed per call. Large, because a background thread needs the GIL between two calls."""


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file next to `path` for writing. After the block it is fsynced and renamed to `path`.

    Raises WriteError for any OSError, and leaves no partial file.
    """
    target = Path(path)
    temporary = target.with_name(f"{PARTIAL}{_process_name()}-{target.name}")
    try:
        _make_directory(target.parent)
        if target.parent not in _cleaned_directories:  # once, because many small files are written
            _cleaned_directories.add(target.parent)
            _remove_partial_files(target.parent)
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _fsync_directory(target.parent)
    except OSError as error:
        raise _write_error(target, error) from error
    finally:
        with contextlib.suppress(OSError):  # the error being raised is more useful
            temporary.unlink()


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary directory. After the block it is fsynced and renamed to `path`.

    Raises WriteError if `path` exists and is not empty, unless `replace`: then it stays until the new one is complete.
    """
    target = Path(path)
    temporary = target.with_name(f"{PARTIAL}{_process_name()}-{target.name}")
    backup = target.with_name(f"{BACKUP}{_process_name()}-{target.name}")
    try:
        _make_directory(target.parent)
        _remove_partial_files(target.parent)
        for left in (backup, temporary):  # of an earlier process with this process id
            if left.exists():
                _remove_or_restore(left)
        if not replace:
            check_empty(target)
        temporary.mkdir()
        yield temporary
        _fsync_tree(temporary)
        _replace_directory(temporary, target, backup)
    except OSError as error:
        raise _write_error(target, error, temporary) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_directory(temporary: Path, target: Path, backup: Path) -> None:
    """Rename a complete directory to `target`; an existing `target` becomes `backup` first.

    A process that is killed between the two renames leaves no `target`, so whoever cleans up next must not delete the
    backup but move it back (`_remove_or_restore`). Once the new directory is in place, the backup gets the temporary
    name, which `atomic_directory` deletes: a directory under the name `backup` is always complete.
    """
    try:
        if target.is_dir() and any(target.iterdir()):
            os.replace(target, backup)
        os.replace(temporary, target)
    except BaseException:
        if backup.exists() and not target.exists():
            os.replace(backup, target)
        raise
    _fsync_directory(target.parent)
    with contextlib.suppress(OSError):  # there is no backup, or it is deleted later
        os.replace(backup, temporary)


def check_empty(directory: Path) -> None:
    """Raise WriteError if a directory to be written exists and is not empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise WriteError(f"{directory} exists and is not empty: choose another directory or remove it first")


# Cleaning up after killed processes


def remove_stale(directory: str | os.PathLike[str]) -> list[Path]:
    """Delete what interrupted writes left in `directory`. Returns what was deleted.

    A directory that was being replaced is moved back if the new one is not in place. The caller must be the only
    writer: the files of processes that are still running, here or on another host, are deleted too.
    """
    stale = sorted(Path(directory).glob(f"{PARTIAL}*"))
    return [path for path in stale if _remove_or_restore(path)]


def restore_replaced(directory: Path) -> None:
    """Move back directories whose replacement was interrupted because the process was killed."""
    if directory.is_dir():
        _remove_partial_files(directory, BACKUP)


def _remove_partial_files(directory: Path, prefix: str = PARTIAL) -> None:
    """Delete partial files of killed processes on this host, and restore what they were replacing."""
    pattern = re.compile(rf"{re.escape(PARTIAL)}(?:replaced-)?(\d{{1,10}})-{_host()}-.*", re.DOTALL)
    for path in list(directory.iterdir()):
        match = pattern.fullmatch(path.name)
        if match and path.name.startswith(prefix) and not is_alive(int(match[1])):
            with contextlib.suppress(OSError):  # not fatal: the next process tries again
                _remove_or_restore(path)


def _remove_or_restore(path: Path) -> bool:
    """Delete a partial file or directory, or move a backup back if it is the only complete copy. True if deleted."""
    match = re.fullmatch(rf"{re.escape(BACKUP)}\d+-[0-9a-f]{{8}}-(.+)", path.name, re.DOTALL)
    if match is not None and path.is_dir():
        target = path.with_name(match[1])
        if not target.exists() or (target.is_dir() and not any(target.iterdir())):
            os.replace(path, target)
            return False
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return True


def _process_name() -> str:
    """Part of temporary names: the process that writes the file."""
    return f"{os.getpid()}-{_host()}"


@functools.cache
def _host() -> str:
    """A hash of the host name for temporary names: on a shared disk, the pids of other hosts mean nothing here."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/whimbrel`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "whimbrel"


def is_private(path: Path) -> bool:
    """Whether a file exists, and no other user could have written it or replaced it in its directory."""
    return path.exists() and all(
        status.st_uid == os.getuid() and not status.st_mode & 0o022 for status in (path.stat(), path.parent.stat())
    )


def format_bytes(size: int) -> str:
    """`size` in KiB, MiB or GiB, as in "1.50 GiB"."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def broken_link(path: Path) -> str:
    """For the message about a missing file: where a symbolic link points to; empty for other paths."""
    return f" (a broken symbolic link to {path.readlink()})" if path.is_symlink() and not path.exists() else ""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for anything invalid, including nesting beyond the recursion limit."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Hex digest of a file's bytes."""
    digest, chunk = hashlib.sha256(), memoryview(bytearray(HASH_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


def _make_directory(directory: Path) -> None:
    """Create a directory and its missing parents, and fsync each entry so that they survive a power loss."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _fsync_directory(path.parent)


def _fsync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        else:
            _fsync_directory(path)
    _fsync_directory(directory)


def _fsync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_error(target: Path, error: OSError, temporary: Path | None = None) -> WriteError:
    if isinstance(error, WriteError):
        return WriteError(str(error) if temporary is None else str(error).replace(str(temporary), str(target)))
    return WriteError(f"cannot write {target}: {error.strerror or error}; no partial file is left")
