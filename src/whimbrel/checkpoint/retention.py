"""Which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from whimbrel.base.errors import CheckpointError
from whimbrel.base.logging import get_logger
from whimbrel.checkpoint.layout import list_checkpoints, remove_checkpoint, step_folders
from whimbrel.checkpoint.manifest import read_manifest

__all__ = ["best_first", "prune_checkpoints"]

logger = get_logger(__name__)


def best_first(run: Path, *, greater_is_better: bool) -> list[tuple[float, Path]]:
    """The checkpoints of a run that have a metric, the best first; of equals the older one. NaN is no metric."""
    found = []
    for step, path in list_checkpoints(run).items():
        try:
            metric = read_manifest(path).metric
        except CheckpointError:  # loading it will say so
            continue
        if metric is not None and not math.isnan(metric):
            found.append((-metric if greater_is_better else metric, step, metric, path))
    return [(metric, path) for _, _, metric, path in sorted(found)]


def prune_checkpoints(
    run: Path, newest: int, *, keep: int, best: int, greater_is_better: bool, damaged: Collection[Path] = ()
) -> list[Path]:
    """Remove all up to step `newest` but the `keep` newest whole ones and the `best` best; say which.

    What lies past `newest` comes from before the run went back, and is let be. What cannot be removed is reported and
    tried again after the next save: the new checkpoint is safe either way.
    """
    folders = [path for step, path in step_folders(run).items() if step <= newest]
    whole = [path for path in list_checkpoints(run).values() if path in folders and path not in damaged]
    preserved = [path for _, path in best_first(run, greater_is_better=greater_is_better) if path in whole][:best]
    removed = []
    for path in folders:
        if path in whole[-keep:] or path in preserved:
            continue
        try:
            remove_checkpoint(path)
            removed.append(path)
        except OSError as error:
            logger.warning("cannot remove the old checkpoint %s: %s; it stays for now", path, error.strerror)
    return removed
