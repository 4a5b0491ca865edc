"""Killing the process, or failing the disk, at any system call of a save always leaves a valid checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("how", ["killed", "killed during async save", "killed with a damaged checkpoint"])
def test_kill_at_any_system_call_leaves_a_valid_checkpoint(how: str, run_lane) -> None:
    found = run_lane(how)
    assert len(found) >= 5
    assert [fault for fault in found if fault is not None] == []


@pytest.mark.parametrize("how", ["full disk once", "full disk", "io error once", "io error"])
def test_disk_error_at_any_call_of_a_save_leaves_a_valid_checkpoint(how: str, run_lane) -> None:
    found = run_lane(how)
    assert len(found) >= 5
    assert [fault for fault in found if fault is not None] == []


def test_files_are_synced_before_the_rename_and_old_checkpoints_removed_after_it(run_lane, tmp_path: Path) -> None:
    """Surviving a power cut needs the right order of fsync, rename and removal."""
    folder = tmp_path / "base" / "checkpoints"
    dirty: set[Path] = set()
    placed = renamed = removed = False
    for line in run_lane("notes"):
        word, path, to = line.split("\t")
        path = Path(path)
        if word in ("fsync", "fdatasync"):
            dirty.discard(path)
            placed = placed or (renamed and path == folder)
        elif word.startswith("rename"):
            if Path(to) == folder / "step-00000003":
                assert {file for file in dirty if file.is_relative_to(path)} == set()
                renamed = True
            dirty = {Path(to) / file.relative_to(path) if file.is_relative_to(path) else file for file in dirty}
            dirty |= {path.parent, Path(to).parent}
        elif word in ("unlink", "unlinkat", "rmdir"):
            dirty -= {path}
            if path.is_relative_to(folder / "step-00000001"):
                assert placed
                removed = True
        else:
            dirty |= {path, path.parent} if word.startswith(("open", "mkdir")) else {path}
    assert placed
    assert removed
