"""Killing the process, or failing the disk, at any system call of a save always leaves a valid checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("scenario", ["killed", "killed during async save", "killed with a damaged checkpoint"])
def test_kill_at_any_system_call_leaves_a_valid_checkpoint(scenario: str, run_scenario) -> None:
    found = run_scenario(scenario)
    assert len(found) >= 5
    assert [fault for fault in found if fault is not None] == []


@pytest.mark.parametrize("scenario", ["full disk once", "full disk", "io error once", "io error"])
def test_disk_error_at_any_call_of_a_save_leaves_a_valid_checkpoint(scenario: str, run_scenario) -> None:
    found = run_scenario(scenario)
    assert len(found) >= 5
    assert [fault for fault in found if fault is not None] == []


def test_files_are_synced_before_the_rename_and_old_checkpoints_removed_after_it(run_scenario, tmp_path: Path) -> None:
    """Surviving a power loss needs the right order of fsync, rename and removal."""
    folder = tmp_path / "base" / "checkpoints"
    dirty: set[Path] = set()
    placed = renamed = removed = False
    for line in run_scenario("trace"):
        call, path, to = line.split("\t")
        path = Path(path)
        if call in ("fsync", "fdatasync"):
            dirty.discard(path)
            placed = placed or (renamed and path == folder)
        elif call.startswith("rename"):
            if Path(to) == folder / "step-00000003":
                assert {file for file in dirty if file.is_relative_to(path)} == set()
                renamed = True
            dirty = {Path(to) / file.relative_to(path) if file.is_relative_to(path) else file for file in dirty}
            dirty |= {path.parent, Path(to).parent}
        elif call in ("unlink", "unlinkat", "rmdir"):
            dirty -= {path}
            if path.is_relative_to(folder / "step-00000001"):
                assert placed
                removed = True
        else:
            dirty |= {path, path.parent} if call.startswith(("open", "mkdir")) else {path}
    assert placed
    assert removed
