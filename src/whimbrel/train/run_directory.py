"""The files of a run directory: `config.toml`, and `log.jsonl` with the metrics as one JSON object per line.

Does not import torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.base.files import atomic_file
from whimbrel.checkpoint import step_directories
from whimbrel.config import did_you_mean_path, dump_toml, load_toml, to_table

if TYPE_CHECKING:
    from whimbrel.distributed import World
    from whimbrel.train.config import TrainerConfig

    ConfigT = TypeVar("ConfigT", bound=TrainerConfig)

__all__ = [
    "LOG_FILE",
    "REQUIRED_FIELDS",
    "as_number",
    "check_directory",
    "clear_directory",
    "events_folder",
    "last_line",
    "log_line",
    "log_path",
    "parse_log",
    "read_log",
    "record_launch",
    "record_settings",
    "resume_after_restart",
    "to_json",
    "truncate_log",
]

CONFIG_FILE, LOG_FILE, LAUNCH_FILE = "config.toml", "log.jsonl", ".launch"
SESSION_ONLY = ("resume", "overwrite_output_dir")
"""Settings of one `train()` call, not of the run: recorded, they would apply to the next session too."""

REQUIRED_FIELDS = {
    "step": ("after", "loss", "tokens"),
    "validation": ("after", "loss"),
    "sample": ("after", "text"),
    "log": ("after",),
}
"""Required fields by the kind of a line. `after` is the number of completed steps."""

READ_BLOCK_BYTES = 1 << 16

logger = logging.getLogger(__name__)


def check_directory(config: TrainerConfig, *, explicit: bool) -> None:
    """Raise if the directory contains a run that is neither resumed nor overwritten. The caller holds its lock.

    `explicit`: the user requested a resume, so warn if there is no checkpoint.
    """
    directory, checkpoints = config.output_dir, step_directories(config.output_dir)
    if checkpoints and not (config.resume.latest or config.resume.path or config.overwrite_output_dir):
        raise ConfigError(
            f"{directory} already contains a run at step {max(checkpoints)}: set resume_from_checkpoint=True to resume "
            "it, overwrite_output_dir=True to restart, or choose another output_dir"
        )
    if config.resume.latest and not checkpoints:
        level = logging.WARNING if explicit else logging.INFO
        logger.log(level, "No checkpoint found in %s: starting a new run", directory)


def resume_after_restart(config: ConfigT, world: World) -> ConfigT:
    """The config of a process that torch elastic restarted: resume the newest checkpoint, if there is one.

    `overwrite_output_dir`, `resume.path` and a missing `resume.latest` apply to the first start only.
    """
    if world.run_on_main(partial(_is_restart, config.output_dir)):
        resume = replace(config.resume, latest=True, path=None)
        return replace(config, overwrite_output_dir=False, resume=resume)
    return config


def record_launch(directory: Path) -> None:
    """Record which torch elastic launch trains in the directory. The caller holds its lock."""
    if (launch := _launch()) is not None:
        with atomic_file(directory / LAUNCH_FILE, "w") as file:
            file.write(json.dumps(launch))


def _is_restart(directory: Path) -> bool:
    """Whether another process of the same launch has saved checkpoints here."""
    launch = _launch()
    if launch is None or not step_directories(directory):
        return False
    try:
        recorded = json.loads((directory / LAUNCH_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    # One process may train several times, so its own record does not mean a restart.
    return bool(recorded["id"] == launch["id"] and recorded != launch)


def _launch() -> dict[str, Any] | None:
    """The torch elastic launch that started this process, and the process; None without torch elastic.

    All restarts share the ID of a launch. torchrun sets it to "none" by default: the agent's process ID replaces it.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    host = socket.gethostname()
    return {"id": f"{host}:{os.getppid()}" if run_id == "none" else run_id, "host": host, "pid": os.getpid()}


def clear_directory(directory: Path) -> None:
    """Remove the files that a run writes, and nothing else."""
    for folder in (*step_directories(directory).values(), *directory.glob("ema/step-*"), *_event_folders(directory)):
        shutil.rmtree(folder)
    for file in (LOG_FILE, CONFIG_FILE):
        (directory / file).unlink(missing_ok=True)


def events_folder(directory: Path) -> str | None:
    """The TensorBoard directory of earlier sessions, from `config.toml` or the default; None if there is none."""
    table = load_toml(directory / CONFIG_FILE) if (directory / CONFIG_FILE).exists() else {}
    folders = _event_folders(directory)
    configured: str | None = table.get("log", {}).get("dir")
    return configured or (str(folders[-1]) if folders else None)


def record_settings(config: TrainerConfig, *, resumed: bool) -> None:
    """Write `config.toml`; on resume, warn about settings that changed."""
    path = config.output_dir / CONFIG_FILE
    table = {name: value for name, value in to_table(config).items() if name not in SESSION_ONLY}
    if resumed and path.exists():
        for change in _changes(load_toml(path), table):
            logger.warning("Changed since the run started: %s", change)
    with atomic_file(path, "w") as file:
        file.write(dump_toml(table))


def _changes(before: dict[str, Any], now: dict[str, Any], section: str = "") -> list[str]:
    """The settings that differ between two tables, as messages."""
    changes = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) or isinstance(new, dict):
            changes += _changes(old or {}, new or {}, f"{section}{name}.")
        elif old != new:
            changes.append(f"{section}{name} was {old}, now {new}")
    return changes


def _event_folders(directory: Path) -> list[Path]:
    """Default folders that contain only TensorBoard events, oldest first."""
    return sorted(
        path
        for path in directory.glob("runs/*_*")
        if re.fullmatch(r"\d{19}_.+", path.name)
        and all(file.name.startswith("events.out.tfevents.") for file in path.iterdir())
    )


def log_line(kind: str, after: int, fields: Mapping[str, Any]) -> str:
    """Format a line; fields named `kind` or `after` get an underscore appended."""
    record = {"kind": kind, "after": after}
    for name, value in fields.items():
        record[f"{name}_" if name in ("kind", "after") else name] = to_json(value)
    return json.dumps(record, allow_nan=False) + "\n"


def to_json(value: Any) -> Any:
    """Convert to JSON types: tensors and arrays to numbers, non-finite numbers to null, other objects to strings."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else str(value)


def as_number(value: Any) -> int | float | None:
    """The value, which may be a tensor or array with one element, as a Python number; None if it is not a number."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def log_path(run: Path) -> Path:
    """The log of a run, given its directory or the log itself; raises DataError if it does not exist."""
    log = run / LOG_FILE if run.is_dir() else run
    if not log.is_file():
        raise DataError(f"expected a run directory or its log.jsonl, got {run}{did_you_mean_path(run, [LOG_FILE])}")
    return log


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read all lines, except an incomplete last one (from a crash)."""
    return parse_log(path, path.read_bytes())


def parse_log(path: Path, content: bytes, first: int = 1) -> list[dict[str, Any]]:
    """The complete lines of `content`, read from `path` where line `first` starts; raises DataError."""
    lines = content.decode(errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=first):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not JSON: {error}") from error
        missing = _missing(record)
        if missing is not None:
            raise DataError(f"expected a log line with '{missing}' in {path}:{number}")
        records.append(record)
    return records


def truncate_log(path: Path, step: int) -> None:
    """Remove lines past `step` steps and a line cut short by a crash; creates the file if it is missing.

    Truncates in place, so it works on a full disk. If a line is damaged (by a power failure), the file is first copied
    to `log.jsonl.damaged`; that line and all after it are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    size = 0
    with path.open("rb") as file:
        for count, line in enumerate(file, start=1):
            after = _after(line)
            if after is None and line.endswith(b"\n"):
                backup = path.with_name(f"{path.name}.damaged")
                logger.warning(
                    "%s:%d is damaged: removing this line and all after it (full copy: %s)", path, count, backup
                )
                shutil.copyfile(path, backup)
            if after is None or after > step:
                break
            size += len(line)
    os.truncate(path, size)


def _after(line: bytes) -> int | None:
    """The number of completed steps when a line was written; None if the line is cut short or damaged."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    after = record["after"] if isinstance(record, dict) and _missing(record) is None else None
    return after if isinstance(after, int) else None


def last_line(path: Path, kind: str) -> dict[str, Any] | None:
    """The last line of a kind, searched block by block from the end of the file."""
    prefix = f'{{"kind": "{kind}"'.encode()
    with path.open("rb") as file:
        start, rest = file.seek(0, os.SEEK_END), b""
        while start > 0:
            end, start = start, max(0, start - READ_BLOCK_BYTES)
            file.seek(start)
            block = file.read(end - start) + rest
            if prefix in block:
                for line in reversed(block.split(b"\n")[1 if start else 0 : -1]):
                    if line.startswith(prefix):
                        record: dict[str, Any] = json.loads(line)
                        return record
            rest = block[: block.find(b"\n") + 1] or block  # the end of a line that starts in an earlier block
    return None


def _missing(record: object) -> str | None:
    """The first required field that a line is missing, or None."""
    if not isinstance(record, dict) or record.get("kind") not in REQUIRED_FIELDS:
        return "kind"
    return next((key for key in REQUIRED_FIELDS[record["kind"]] if key not in record), None)
