"""Atomic files and directories."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whimbrel.base.errors import WriteError
from whimbrel.base.files import (
    BACKUP,
    PARTIAL,
    _host,
    atomic_directory,
    atomic_file,
    remove_stale,
    restore_replaced,
    sha256_file,
)


def test_file_appears_only_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file.txt"
    with atomic_file(target, "w") as file:
        file.write("half")
        assert not target.exists()
        file.write(" and half")
    assert target.read_text() == "half and half"
    assert os.listdir(target.parent) == ["file.txt"]


def test_error_leaves_the_old_file_and_no_partial_file(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    target.write_text("old")
    with pytest.raises(KeyError), atomic_file(target, "w") as file:
        file.write("new")
        raise KeyError
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_full_disk_is_a_one_line_error_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match=r"cannot write .*shard\.bin: No space left on device"):
        with atomic_file(tmp_path / "shard.bin") as file:
            file.write(b"x")
    assert os.listdir(tmp_path) == []


def test_parent_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WriteError, match=r"cannot write .*/file/deep: "), atomic_file(tmp_path / "file" / "deep"):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_directory_appears_only_when_complete(tmp_path: Path) -> None:
    with pytest.raises(KeyError), atomic_directory(tmp_path / "made") as folder:
        (folder / "a").write_text("a")
        raise KeyError
    assert os.listdir(tmp_path) == []
    with atomic_directory(tmp_path / "made") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("a")
    assert (tmp_path / "made" / "sub" / "a").read_text() == "a"


def test_existing_directory_is_not_replaced_by_default(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    with pytest.raises(WriteError, match="exists and is not empty"), atomic_directory(tmp_path / "there"):
        pass
    assert (tmp_path / "there" / "mine").read_text() == "mine"


def test_remove_stale_deletes_partial_files(tmp_path: Path) -> None:
    (tmp_path / ".partial-1-x").mkdir()
    (tmp_path / ".partial-1-y").write_text("y")
    (tmp_path / "whole").write_text("z")
    assert {path.name for path in remove_stale(tmp_path)} == {".partial-1-x", ".partial-1-y"}
    assert os.listdir(tmp_path) == ["whole"]


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_file(tmp_path / "abc").startswith("ba7816bf8f01cfea")


def test_replaced_directory_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "old").write_text("old")
    with pytest.raises(KeyError), atomic_directory(tmp_path / "there", replace=True):
        raise KeyError
    with atomic_directory(tmp_path / "there", replace=True) as folder:
        (folder / "new").write_text("new")
        assert os.listdir(tmp_path / "there") == ["old"]
    assert os.listdir(tmp_path / "there") == ["new"]
    assert os.listdir(tmp_path) == ["there"]


def test_replaced_directory_is_restored_if_the_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "old").write_text("old")
    replace, calls = os.replace, []

    def broken(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(WriteError, match=r"cannot write .*/there: Input/output error"):
        with atomic_directory(tmp_path / "there", replace=True) as folder:
            (folder / "new").write_text("new")
    assert os.listdir(tmp_path / "there") == ["old"]


def test_errors_name_the_final_path_not_the_temporary_one(tmp_path: Path) -> None:
    with pytest.raises(WriteError) as caught, atomic_directory(tmp_path / "made") as folder:
        raise WriteError(f"cannot write {folder / 'model'}: full")
    assert str(caught.value) == f"cannot write {tmp_path / 'made' / 'model'}: full"


KILLED = """
import os, signal, sys
from whimbrel.base.files import atomic_directory, atomic_file
with atomic_directory(sys.argv[1] + "/model") as folder, atomic_file(sys.argv[1] + "/model.gguf") as file:
    (folder / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_later_write_removes_partial_files_of_a_killed_process(tmp_path: Path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    left = list(tmp_path.glob(".partial-*"))
    assert len(left) == 2
    running = tmp_path / left[0].name.replace(left[0].name.split("-")[1], str(os.getppid()))
    of_another_host = tmp_path / ".partial-999999999-0123abcd-model"
    for other in (running, of_another_host):
        other.mkdir()
    with atomic_directory(tmp_path / "model") as folder:
        (folder / "weights").write_text("whole")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "model", running, of_another_host])


REPLACED_AND_KILLED = """
import os, shutil, signal, sys
from whimbrel.base import files
target, fatal_call = sys.argv[1], int(sys.argv[2])
with files.atomic_directory(target) as directory:
    (directory / "weights").write_text("old")
    (directory / "config").write_text("old")
calls = 0
def killing(function, before):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if before and calls == fatal_call:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return function(*args, **kwargs)
        finally:
            if calls == fatal_call:
                os.kill(os.getpid(), signal.SIGKILL)
    return call
for module, name in ((os, "replace"), (os, "mkdir"), (os, "fsync"), (os, "unlink"), (os, "rmdir")):
    setattr(module, name, killing(getattr(module, name), sys.argv[3] == "before"))
with files.atomic_directory(target, replace=True) as directory:
    (directory / "weights").write_text("new")
    (directory / "config").write_text("new")
print("completed")
"""


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("when", ["before", "after"])
def test_kill_at_any_point_of_a_replacement_loses_nothing(tmp_path: Path, when: str):
    cleanups = {
        "remove_stale": remove_stale,
        "restore_replaced": restore_replaced,
        "write": lambda directory: atomic_directory(directory / "other").__enter__(),
    }
    outcomes = []
    for fatal_call in range(1, 30):
        run = tmp_path / str(fatal_call)
        command = [sys.executable, "-c", REPLACED_AND_KILLED, str(run / "model"), str(fatal_call), when]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if "completed" in done.stdout:
            break
        assert done.returncode < 0, done.stderr
        for name, clean_up in cleanups.items():
            copy = tmp_path / f"{fatal_call}-{name}"
            shutil.copytree(run, copy)
            clean_up(copy)
            assert contents(copy / "model") in (
                {"weights": "old", "config": "old"},
                {"weights": "new", "config": "new"},
            )
            assert not list(copy.glob(f"{PARTIAL}replaced-*"))
            if name == "remove_stale":
                assert os.listdir(copy) == ["model"]
        outcomes.append((run / "model").exists())
    assert "completed" in done.stdout
    assert False in outcomes  # killed between the two renames


def test_interrupt_between_the_renames_restores_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("old")
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if target == tmp_path / "model" and "replaced" not in source.name:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "model", replace=True) as directory:
        (directory / "weights").write_text("new")
    assert contents(tmp_path / "model") == {"weights": "old"}
    assert os.listdir(tmp_path) == ["model"]


def test_interrupted_replacement_counts_as_existing(tmp_path: Path) -> None:
    """A write that must not replace anything does not take the place of a directory that has only been moved aside."""
    with atomic_directory(tmp_path / "model") as directory:
        (directory / "weights").write_text("old")
    (tmp_path / "model").rename(tmp_path / f"{BACKUP}999999999-{_host()}-model")
    with pytest.raises(WriteError, match="not empty"), atomic_directory(tmp_path / "model"):
        pass
    assert contents(tmp_path / "model") == {"weights": "old"}


def test_name_that_ends_like_a_backup_is_an_ordinary_name(tmp_path: Path) -> None:
    (tmp_path / ".partial-999999999-0123abcd-model-replaced").mkdir()
    remove_stale(tmp_path)
    assert os.listdir(tmp_path) == []
