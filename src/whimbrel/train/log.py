"""`log.jsonl`: one JSON object a line, of four kinds."""

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

__all__ = ["FIELDS", "last_step", "log_line", "log_of", "number", "plain", "read_log", "tokens_after", "truncate_log"]

FIELDS = {
    "step": ("after", "loss", "tokens"),
    "validation": ("after", "loss"),
    "sample": ("after", "text"),
    "log": ("after",),
}
"""What a line must have, by its kind. `after` is the number of steps done; `step` counts from 0, as it is printed."""

BLOCK = 1 << 16

logger = logging.getLogger(__name__)


def log_line(kind: str, after: int, fields: Mapping[str, Any]) -> str:
    """One line; a field that has a name of ours gets another."""
    record = {"kind": kind, "after": after}
    for name, value in fields.items():
        record[f"{name}_" if name in ("kind", "after") else name] = plain(value)
    return json.dumps(record, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """`value` as JSON has it: tensors and arrays as numbers, null for one that is not finite, texts for the rest."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else str(value)


def number(value: Any) -> int | float | None:
    """The number that a value is, also as a tensor or an array that holds one alone; None where it is none."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def log_of(run: Path) -> Path:
    """The log of a run, which is named by its directory or by the log itself."""
    log = run / "log.jsonl" if run.is_dir() else run
    if not log.is_file():
        raise DataError(f"{run} is not a run: it has no log.jsonl")
    return log


def read_log(path: Path) -> list[dict[str, Any]]:
    """All lines; a last one cut short by a crash is left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not JSON: {error}") from error
        missing = _missing(record)
        if missing is not None:
            raise DataError(f"{path}:{number} is no line of a run's log: it has no '{missing}'")
        records.append(record)
    return records


def tokens_after(lines: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Tokens of the steps in a log, by the number of steps done; a log that begins later does not know those before."""
    seen, found = 0, {}
    for line in lines:
        if line["kind"] == "step":
            seen += line["tokens"]
        found[int(line["after"])] = seen
    return found


def truncate_log(path: Path, step: int) -> None:
    """Remove lines past `step` steps and a line cut short by a crash; creates the file if it is missing.

    Works in place, so also on a full disk. A damaged line (from a power failure) and all lines after it are moved to
    `log.jsonl.damaged`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    size = 0
    with path.open("rb") as file:
        for count, line in enumerate(file, start=1):
            after = _after(line)
            if after is None and line.endswith(b"\n"):
                aside = path.with_name(f"{path.name}.damaged")
                logger.warning(
                    "%s:%d is damaged: the log continues there, and the rest was moved to %s", path, count, aside
                )
                shutil.copyfile(path, aside)
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
    """The newest line of a step, looked for from the end: a long log is not read through."""
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
    """What a line of the log lacks; None where it has all that its kind must have."""
    if not isinstance(record, dict) or record.get("kind") not in FIELDS:
        return "kind"
    return next((key for key in FIELDS[record["kind"]] if key not in record), None)
