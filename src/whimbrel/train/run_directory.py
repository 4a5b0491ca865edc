"""The run directory: check whether a run may use it, clear it for a restart, write `config.toml`."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

from whimbrel.base.errors import ConfigError
from whimbrel.base.files import atomic_file
from whimbrel.checkpoint import step_directories
from whimbrel.config import dump_toml, load_toml, to_table
from whimbrel.train.config import TrainerConfig

__all__ = ["check_directory", "clear_directory", "events_folder", "record_settings"]

SETTINGS = "config.toml"
SESSION_ONLY = ("resume", "overwrite_output_dir")
"""Settings of one `train()` call, not of the run: recorded, they would apply to the next session too."""

logger = logging.getLogger(__name__)


def check_directory(config: TrainerConfig, *, explicit: bool) -> None:
    """Raise if the directory contains a run that is neither resumed nor overwritten. The caller holds its lock.

    `explicit`: the user requested a resume, so warn if there is no checkpoint.
    """
    directory, found = config.output_dir, step_directories(config.output_dir)
    if found and not (config.resume.latest or config.resume.path or config.overwrite_output_dir):
        raise ConfigError(
            f"{directory} already contains a run at step {max(found)}: set resume_from_checkpoint=True to resume it, "
            "overwrite_output_dir=True to restart, or choose another output_dir"
        )
    if config.resume.latest and not found:
        level = logging.WARNING if explicit else logging.INFO
        logger.log(level, "No checkpoint found in %s: starting from scratch", directory)


def clear_directory(directory: Path) -> None:
    """Remove the files that a run writes, and nothing else."""
    for folder in (*step_directories(directory).values(), *directory.glob("ema/step-*"), *_event_folders(directory)):
        shutil.rmtree(folder)
    for file in ("log.jsonl", SETTINGS):
        (directory / file).unlink(missing_ok=True)


def events_folder(directory: Path) -> str | None:
    """The TensorBoard directory of earlier sessions, from `config.toml` or the default; None if there is none."""
    table = load_toml(directory / SETTINGS) if (directory / SETTINGS).exists() else {}
    folders = _event_folders(directory)
    given: str | None = table.get("log", {}).get("dir")
    return given or (str(folders[-1]) if folders else None)


def record_settings(config: TrainerConfig, *, resumed: bool) -> None:
    """Write `config.toml`; on resume, warn about settings that changed."""
    path = config.output_dir / SETTINGS
    table = {name: value for name, value in to_table(config).items() if name not in SESSION_ONLY}
    if resumed and path.exists():
        for change in _changes(load_toml(path), table):
            logger.warning("Changed since the run started: %s", change)
    with atomic_file(path, "w") as file:
        file.write(dump_toml(table))


def _changes(before: dict[str, Any], now: dict[str, Any], section: str = "") -> list[str]:
    """The settings that differ between two tables, as messages."""
    found = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) or isinstance(new, dict):
            found += _changes(old or {}, new or {}, f"{section}{name}.")
        elif old != new:
            found.append(f"{section}{name} was {old}, now {new}")
    return found


def _event_folders(directory: Path) -> list[Path]:
    """Default folders that contain only TensorBoard events, oldest first."""
    return sorted(
        path
        for path in directory.glob("runs/*_*")
        if re.fullmatch(r"\d{19}_.+", path.name)
        and all(file.name.startswith("events.out.tfevents.") for file in path.iterdir())
    )
