"""Read and write `log.jsonl`, the metrics of a run as one JSON object per line. Does not import torch."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from whimbrel.base.errors import DataError

__all__ = [
    "FIELDS",
    "as_number",
    "last_step",
    "log_line",
    "log_path",
    "read_log",
    "to_json",
    "tokens_after",
    "truncate_log",
]

FIELDS = {
    "step": ("after", "loss", "tokens"),
    "validation": ("after", "loss"),
    "sample": ("after", "text"),
    "log": ("after",),
}
"""Required fields by the kind of a line. `after` is the number of completed steps; `step` counts from 0."""

BLOCK = 1 << 16

logger = logging.getLogger(__name__)


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
    """The value as a Python number, also from a tensor or array with one element; None if it is not a number."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def log_path(run: Path) -> Path:
    """The log of a run, given its directory or the log itself; raises DataError if it does not exist."""
    log = run / "log.jsonl" if run.is_dir() else run
    if not log.is_file():
        raise DataError(f"expected a run directory or its log.jsonl, got {run}")
    return log


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read all lines, except an incomplete last one (from a crash)."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not JSON: {error}") from error
        missing = _missing(record)
        if missing is not None:
            raise DataError(f"expected a log line with '{missing}' in {path}:{number}")
        records.append(record)
    return records


def tokens_after(lines: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Cumulative tokens by the number of completed steps, counted from the first line of the log."""
    total, tokens = 0, {}
    for line in lines:
        if line["kind"] == "step":
            total += line["tokens"]
        tokens[int(line["after"])] = total
    return tokens


def truncate_log(path: Path, step: int) -> None:
    """Remove lines past `step` steps and a line cut short by a crash; creates the file if it is missing.

    Works in place, so also on a full disk. If a line is damaged (by a power failure), the file is first copied to
    `log.jsonl.damaged`; that line and all after it are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    size = 0
    with path.open("rb") as file:
        for count, line in enumerate(file, start=1):
            after = _after(line)
            if after is None and line.endswith(b"\n"):
                moved = path.with_name(f"{path.name}.damaged")
                logger.warning(
                    "%s:%d is damaged: removed the rest of the log; the complete file is in %s", path, count, moved
                )
                shutil.copyfile(path, moved)
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


def last_step(path: Path) -> dict[str, Any] | None:
    """The last line of kind `step`, searched from the end of the file."""
    with path.open("rb") as file:
        end, block = file.seek(0, os.SEEK_END), BLOCK
        while True:
            start = file.seek(max(0, end - block))
            lines = file.read(end - start).split(b"\n")[1 if start else 0 : -1]
            for line in reversed(lines):
                if line.startswith(b'{"kind": "step"'):
                    record: dict[str, Any] = json.loads(line)
                    return record
            if start == 0:
                return None
            block *= 4


def _missing(record: object) -> str | None:
    """The first required field that a line is missing, or None."""
    if not isinstance(record, dict) or record.get("kind") not in FIELDS:
        return "kind"
    return next((key for key in FIELDS[record["kind"]] if key not in record), None)
