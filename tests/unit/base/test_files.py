"""Atomic files and directories."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from whimbrel.base.errors import WriteError
from whimbrel.base.files import atomic_directory, atomic_file, remove_stale, sha256_file


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


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_replaced_directory_of_a_killed_process_is_kept_until_the_next_write(tmp_path: Path):
    killed = """
import os, signal, sys
from whimbrel.base import files
with files.atomic_directory(sys.argv[1]) as folder:
    (folder / "weights").write_text("old")
replace = os.replace
def once(source, target):
    replace(source, target)
    os.kill(os.getpid(), signal.SIGKILL)
os.replace = once
with files.atomic_directory(sys.argv[1], replace=True) as folder:
    (folder / "weights").write_text("new")
"""
    subprocess.run([sys.executable, "-c", killed, str(tmp_path / "model")], check=False)
    [kept] = tmp_path.glob(".partial-*-replaced")
    with atomic_file(tmp_path / "other", "w") as file:
        file.write("x")
    assert (kept / "weights").read_text() == "old"
    with atomic_directory(tmp_path / "model", replace=True) as folder:
        (folder / "weights").write_text("newer")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]
