"""Files and folders that are whole or absent, never half-written."""

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

__all__ = ["PARTIAL", "atomic_directory", "atomic_file", "parse_json", "remove_stale", "sha256_file"]

PARTIAL = ".partial-"
"""What the temporary name of an unfinished file or folder starts with."""
REPLACED = "-replaced"
"""Suffix of the temporary name of a folder that is being replaced."""
_swept: set[Path] = set()
CHUNK = 4 * 2**20
"""Bytes read at a time: few, so that a thread that hashes seldom asks for the interpreter."""


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary neighbour of `path` for writing; it takes the name `path` only once it is whole and on disk."""
    target = Path(path)
    temporary = target.with_name(f"{PARTIAL}{os.getpid()}-{_host()}-{target.name}")
    try:
        _make_folder(target.parent)
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
        with contextlib.suppress(OSError):  # the error that is on its way says more
            temporary.unlink()


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder; when the block ends it is fsynced and takes the name `path`.

    It replaces nothing, or, with `replace`, a folder that stays in its place until the new one is ready.
    """
    target = Path(path)
    temporary = target.with_name(f"{PARTIAL}{os.getpid()}-{_host()}-{target.name}")
    try:
        if not replace and target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise WriteError(f"{target} exists and is not empty: name another directory or remove it first")
        if temporary.exists():
            shutil.rmtree(temporary)
        _make_folder(target.parent)
        _sweep(target.parent)
        temporary.mkdir()
        yield temporary
        _fsync_tree(temporary)
        _take_place(temporary, target)
        for aside in _left_by_dead(target.parent, REPLACED):  # of older replacements, which this one supersedes
            if aside.name.endswith(f"-{_host()}-{target.name}{REPLACED}"):
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise _write_error(target, error, temporary) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_stale(folder: str | os.PathLike[str]) -> list[Path]:
    """Delete what an interrupted write left in `folder`; say what was deleted."""
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
    digest, chunk = hashlib.sha256(), memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


def _sweep(folder: Path) -> None:
    """Remove partial files that killed processes left in `folder`; runs once per process and folder."""
    if folder in _swept:
        return
    _swept.add(folder)
    for path in _left_by_dead(folder):
        if not path.name.endswith(REPLACED):  # it may be the only complete copy
            with contextlib.suppress(OSError):  # a leftover does no harm
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _left_by_dead(folder: Path, ending: str = "") -> list[Path]:
    """Temporary files and folders in `folder` left by dead processes of this machine."""
    named = re.compile(rf"{re.escape(PARTIAL)}(\d{{1,10}})-{_host()}-.*{re.escape(ending)}", re.DOTALL)
    found = ((path, named.fullmatch(path.name)) for path in folder.iterdir())
    return [path for path, match in found if match and not _runs(int(match[1]))]


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is running as another user
        return True
    return True


@functools.cache
def _host() -> str:
    """The machine's name in temporary file names: on a shared disk, pids of other hosts are meaningless here."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, each of them to stay."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _fsync_directory(path.parent)


def _take_place(temporary: Path, target: Path) -> None:
    """Rename a finished folder to `target`; what was there stays until then, and comes back where the rename fails."""
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
    return WriteError(f"cannot write {target}: {error.strerror or error}; nothing was left behind")
