"""Where things lie: `RUN/checkpoints/step-00000500/`, and the files of each component in it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from whimbrel.checkpoint.component import SharingPattern, StateComponent
from whimbrel.checkpoint.manifest import MANIFEST
from whimbrel.checkpoint.ranks import Ranks

__all__ = [
    "Place",
    "checkpoint_path",
    "latest_checkpoint",
    "list_checkpoints",
    "place_of",
    "remove_checkpoint",
    "step_folders",
    "step_of",
]


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that the name of a folder stands for, where it stands for one."""
    found = re.fullmatch(r"step-(\d+)", path.name)
    return None if found is None else int(found[1])


def step_folders(run: Path) -> dict[int, Path]:
    """Every folder of a run that is named for a step, whole or not, lowest first."""
    found = {step: path for path in (run / "checkpoints").glob("step-*") if (step := step_of(path)) is not None}
    return dict(sorted(found.items()))


def list_checkpoints(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by step, lowest first."""
    return {step: path for step, path in step_folders(run).items() if (path / MANIFEST).is_file()}


def latest_checkpoint(run: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return next(reversed(list_checkpoints(run).values()), None)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; from the first moment on it is none, whatever happens next."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


class Place(NamedTuple):
    """How the files of a component begin on this rank, and whether this rank writes them."""

    stem: str
    writes: bool


def place_of(component: StateComponent, ranks: Ranks, groups: Mapping[str, Any]) -> Place:
    """Where this rank finds its piece of a component."""
    match component.sharing_pattern:
        case SharingPattern.GLOBAL | SharingPattern.REPLICATED:
            return Place(component.key, ranks.first)
        case SharingPattern.PER_RANK:
            return Place(f"{component.key}.rank-{ranks.rank:05d}", True)  # noqa: FBT003
        case SharingPattern.PER_NODE:
            return Place(f"{component.key}.node-{ranks.node:05d}", ranks.local_rank == 0)
        case SharingPattern.PER_GROUP:
            leader = ranks.leader(groups[str(component.process_group_name)])
            return Place(f"{component.key}.group-{leader:05d}", ranks.rank == leader)
