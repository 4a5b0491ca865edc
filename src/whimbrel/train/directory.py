"""The run directory: whether a run may use it, what is removed to begin anew, and the settings it keeps."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

from whimbrel.base.errors import ConfigError
from whimbrel.base.files import atomic_file
from whimbrel.checkpoint import step_folders
from whimbrel.config import dump_toml, load_toml, to_table
from whimbrel.train.config import TrainerConfig

__all__ = ["check_directory", "clear_directory", "events_folder", "record_settings"]

SETTINGS = "config.toml"
OF_ONE_SITTING = ("resume", "overwrite_output_dir")
"""Settings that say how a sitting begins, not what the run is: written down, they would begin the next one so too."""

logger = logging.getLogger(__name__)


def check_directory(config: TrainerConfig, *, explicit: bool) -> None:
    """Raise if the directory contains a run that is neither resumed nor overwritten. The caller holds its lock.

    `explicit`: the user asked to resume, so log a warning if there is no checkpoint.
    """
    directory, found = config.output_dir, step_folders(config.output_dir)
    if found and not (config.resume.latest or config.resume.path or config.overwrite_output_dir):
        raise ConfigError(
            f"{directory} holds a run at step {max(found)}: resume_from_checkpoint=True goes on with it, "
            "overwrite_output_dir=True begins anew, or name another output_dir"
        )
    if config.resume.latest and not found:
        level = logging.WARNING if explicit else logging.INFO
        logger.log(level, "No checkpoint found in %s: starting from scratch", directory)


def clear_directory(directory: Path) -> None:
    """Remove what a run has written, and nothing else."""
    for folder in (*step_folders(directory).values(), *directory.glob("ema/step-*"), *_event_folders(directory)):
        shutil.rmtree(folder)
    for file in ("log.jsonl", SETTINGS):
        (directory / file).unlink(missing_ok=True)


def events_folder(directory: Path) -> str | None:
    """Where earlier sittings wrote TensorBoard events: as the settings of the run say, else in a folder of its own."""
    table = load_toml(directory / SETTINGS) if (directory / SETTINGS).exists() else {}
    folders = _event_folders(directory)
    given: str | None = table.get("log", {}).get("dir")
    return given or (str(folders[-1]) if folders else None)


def record_settings(config: TrainerConfig, *, resumed: bool) -> None:
    """Write `config.toml`; of a run that goes on, say what is not as it was."""
    path = config.output_dir / SETTINGS
    table = {name: value for name, value in to_table(config).items() if name not in OF_ONE_SITTING}
    if resumed and path.exists():
        for change in _changes(load_toml(path), table):
            logger.warning("changed since the run began: %s", change)
    with atomic_file(path, "w") as file:
        file.write(dump_toml(table))


def _changes(before: dict[str, Any], now: dict[str, Any], section: str = "") -> list[str]:
    """Settings that differ between two tables, in words."""
    found = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) or isinstance(new, dict):
            found += _changes(old or {}, new or {}, f"{section}{name}.")
        elif old != new:
            found.append(f"{section}{name} was {old} and is {new}")
    return found


def _event_folders(directory: Path) -> list[Path]:
    """Folders that hold TensorBoard events alone and are named as the arguments name them, oldest first."""
    return sorted(
        path
        for path in directory.glob("runs/*_*")
        if re.fullmatch(r"\d{19}_.+", path.name)
        and all(file.name.startswith("events.out.tfevents.") for file in path.iterdir())
    )
