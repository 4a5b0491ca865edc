"""Which checkpoints are kept."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from whimbrel.checkpoint import CheckpointManager, checkpoint_path, list_checkpoints, read_manifest
from whimbrel.checkpoint.manager import rank_by_metric


@pytest.mark.parametrize(
    ("keep", "best", "greater", "metrics", "left"),
    [
        (None, 1, False, [3, 2, 1], [1, 2, 3]),
        (2, None, False, [3, 2, 1, 0], [3, 4]),
        (1, 1, False, [3, 0.0, 2, 5], [2, 4]),
        (1, 1, True, [0.0, -1, -2, -3], [1, 4]),
        (1, 2, False, [5, 1, 4, 3, 9], [2, 4, 5]),
        (1, 2, True, [5, 1, 4, 3, 0], [1, 3, 5]),
        (1, 1, False, [math.nan, 7, math.nan, math.nan], [2, 4]),
        (1, 1, True, [math.nan, None, None], [3]),
        (1, 1, False, [2, 2, 2], [1, 3]),
        (3, 1, False, [1, 2, 3, 4], [1, 2, 3, 4]),
    ],
)
def test_newest_and_best_checkpoints_are_retained(tmp_path: Path, parts, keep, best, greater, metrics, left) -> None:
    manager = CheckpointManager(tmp_path, keep=keep, best=best, greater_is_better=greater)
    for step, metric in enumerate(metrics, 1):
        manager.save(step, parts(1.0), metric=metric)
        assert manager.newest() == checkpoint_path(tmp_path, step)
    assert list(list_checkpoints(tmp_path)) == left
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [f"step-{step:08d}" for step in left]


def test_best_checkpoint_is_found_on_disk(tmp_path: Path, parts) -> None:
    manager = CheckpointManager(tmp_path)
    assert rank_by_metric(tmp_path, greater_is_better=False) == []
    for step, metric in enumerate([0.5, 0.0, math.nan, None], 1):
        manager.save(step, parts(1.0), metric=metric)
    ranked = [(0.0, checkpoint_path(tmp_path, 2)), (0.5, checkpoint_path(tmp_path, 1))]
    assert rank_by_metric(tmp_path, greater_is_better=False) == ranked
    assert rank_by_metric(tmp_path, greater_is_better=True) == ranked[::-1]


def test_checkpoints_after_a_rollback_are_not_removed(tmp_path: Path, parts) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (2, 9):
        manager.save(step, parts(float(step)))
    manager = CheckpointManager(tmp_path, keep=1)
    manager.load(parts(0.0), checkpoint_path(tmp_path, 2))
    manager.save(3, parts(3.0))
    assert list(list_checkpoints(tmp_path)) == [3, 9]


def test_failed_removal_does_not_fail_the_save(tmp_path: Path, parts, monkeypatch, caplog) -> None:
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, parts(1.0))

    def stuck(path: Path) -> None:
        (path / "manifest.json").unlink()
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("whimbrel.checkpoint.manager.remove_checkpoint", stuck)
        for step in (2, 3, 4):
            manager.save(step, parts(2.0))
    assert caplog.text.count("cannot remove the old checkpoint") == 3  # each of the three once
    assert caplog.text.count(str(checkpoint_path(tmp_path, 1))) == 1
    assert manager.newest() == checkpoint_path(tmp_path, 4)
    manager.save(5, parts(3.0))
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000005"]


def test_manifest_contains_the_metric(tmp_path: Path, parts) -> None:
    manager = CheckpointManager(tmp_path)
    assert read_manifest(manager.save(1, parts(1.0), metric=0)).metric == 0.0
    assert read_manifest(manager.save(2, parts(1.0))).metric is None
