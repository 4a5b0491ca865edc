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

__all__ = ["PARTIAL", "atomic_directory", "atomic_file", "parse_json", "remove_stale", "sha256_file"]

PARTIAL = ".partial-"
"""Prefix of the temporary name of a partly written file or directory."""
REPLACED = "-replaced"
"""Suffix of the temporary name of a directory that is being replaced."""
_swept: set[Path] = set()
HASH_CHUNK = 4 * 2**20
"""Bytes hashed per call. Large, because a background thread needs the GIL between two calls."""


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file next to `path` for writing. After the block it is fsynced and renamed to `path`.

    Raises WriteError for any OSError, and leaves no partial file.
    """
    target = Path(path)
    temporary = target.with_name(f"{PARTIAL}{os.getpid()}-{_host()}-{target.name}")
    try:
        _make_directory(target.parent)
        _sweep(target.parent)
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
    temporary = target.with_name(f"{PARTIAL}{os.getpid()}-{_host()}-{target.name}")
    try:
        if not replace and target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise WriteError(f"{target} exists and is not empty: choose another directory or remove it first")
        if temporary.exists():
            shutil.rmtree(temporary)
        _make_directory(target.parent)
        _sweep(target.parent)
        temporary.mkdir()
        yield temporary
        _fsync_tree(temporary)
        _replace_directory(temporary, target)
        for aside in _partial_of_dead_processes(target.parent, REPLACED):  # left by earlier interrupted replacements
            if aside.name.endswith(f"-{_host()}-{target.name}{REPLACED}"):
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise _write_error(target, error, temporary) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_stale(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete the partial files of interrupted writes in `folder`. Returns what was deleted."""
    stale = sorted(Path(folder).glob(f"{PARTIAL}*"))
    for path in stale:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return stale


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


def _sweep(folder: Path) -> None:
    """Remove partial files of killed processes in `folder`; at most once per process and folder."""
    if folder in _swept:
        return
    _swept.add(folder)
    for path in _partial_of_dead_processes(folder):
        if not path.name.endswith(REPLACED):  # it may be the only complete copy
            with contextlib.suppress(OSError):  # not fatal: it is retried by the next process
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _partial_of_dead_processes(folder: Path, ending: str = "") -> list[Path]:
    """Partial files and directories in `folder` whose process, on this host, no longer exists."""
    named = re.compile(rf"{re.escape(PARTIAL)}(\d{{1,10}})-{_host()}-.*{re.escape(ending)}", re.DOTALL)
    found = ((path, named.fullmatch(path.name)) for path in folder.iterdir())
    return [path for path, match in found if match and not is_alive(int(match[1]))]


@functools.cache
def _host() -> str:
    """A hash of the host name for temporary names: on a shared disk, the pids of other hosts mean nothing here."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _make_directory(folder: Path) -> None:
    """Create a directory and its missing parents, and fsync each entry so that they survive a power loss."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _fsync_directory(path.parent)


def _replace_directory(temporary: Path, target: Path) -> None:
    """Rename a complete directory to `target`. An existing `target` is moved aside first, and back on failure."""
    aside = temporary.with_name(f"{temporary.name}{REPLACED}")
    if target.is_dir() and any(target.iterdir()):
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(target, aside)
    try:
        os.replace(temporary, target)
    except OSError:
        if aside.exists():
            os.replace(aside, target)
        raise
    _fsync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _fsync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        else:
            _fsync_directory(path)
    _fsync_directory(folder)


def _fsync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_error(target: Path, error: OSError, temporary: Path | None = None) -> WriteError:
    if isinstance(error, WriteError):
        return WriteError(str(error) if temporary is None else str(error).replace(str(temporary), str(target)))
    return WriteError(f"cannot write {target}: {error.strerror or error}; no partial file is left")
