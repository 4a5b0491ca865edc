"""Which checkpoints stay."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from pathlib import Path

from whimbrel.base.errors import CheckpointError
from whimbrel.checkpoint.layout import list_checkpoints, remove_checkpoint, step_folders
from whimbrel.checkpoint.manifest import read_manifest

__all__ = ["TEMPORARY", "best_first", "prune_checkpoints", "temporary_checkpoints"]

TEMPORARY = "temporary"
"""Key in a manifest's `about` that marks a checkpoint to remove once a newer one exists."""

logger = logging.getLogger(__name__)


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


def temporary_checkpoints(run: Path) -> set[Path]:
    """The temporary checkpoints of a run, which are removed once a newer one exists."""
    found = set()
    for path in list_checkpoints(run).values():
        try:
            if read_manifest(path).about.get(TEMPORARY):
                found.add(path)
        except CheckpointError:  # loading it will say so
            continue
    return found


def prune_checkpoints(
    run: Path,
    newest: int,
    *,
    keep: int | None,
    best: int,
    greater_is_better: bool,
    damaged: Collection[Path] = (),
    temporary: Collection[Path] = (),
    reported: set[Path],
) -> list[Path]:
    """Remove all up to step `newest` but the `keep` newest whole ones and the `best` best; say which.

    Temporary ones stay only while nothing newer is there, and with `keep` None they are all that is removed. What lies
    past `newest` comes from before the run went back, and is let be. What cannot be removed is reported once (kept in
    `reported`) and tried again after every save: the new checkpoint is safe either way.
    """
    folders = [path for step, path in step_folders(run).items() if step <= newest]
    whole = [path for path in list_checkpoints(run).values() if path in folders and path not in damaged]
    lasting = [path for path in whole if path not in temporary]
    kept = {*whole[-1:], *(lasting if keep is None else lasting[-keep:])}
    if best:
        kept |= set([path for _, path in best_first(run, greater_is_better=greater_is_better) if path in whole][:best])
    removed = []
    for path in folders:
        if path in kept or (keep is None and path not in temporary):
            continue
        try:
            remove_checkpoint(path)
            removed.append(path)
        except OSError as error:
            if path not in reported:
                reported.add(path)
                logger.warning("cannot remove the old checkpoint %s: %s; it stays for now", path, error.strerror)
    return removed
