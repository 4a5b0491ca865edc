"""Where the files of tasks lie, and their lines."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.evaluate.metrics import Item
from whimbrel.evaluate.tasks import TASKS, Task

__all__ = ["DATA_VARIABLE", "find_file", "find_task", "read_items"]

DATA_VARIABLE = "WHIMBREL_EVAL_DATA"
"""The environment variable that names the folder of the files."""
USUAL_FOLDER = Path("data", "eval")
SUFFIXES = (".jsonl", ".jsonl.gz")


def find_task(name: str) -> Task:
    """The task of that name."""
    if name not in TASKS:
        raise ConfigError(f"no task '{name}': there are {', '.join(TASKS)}")
    return TASKS[name]


def find_file(task: Task, folder: str | os.PathLike[str] | None = None) -> Path:
    """The file of a task: in `folder`, else where the environment says, else in `data/eval`."""
    where = Path(folder or os.environ.get(DATA_VARIABLE) or USUAL_FOLDER)
    names = [stem + suffix for stem in (task.file, task.name) for suffix in SUFFIXES]
    found = next((path for name in names if (path := where / name).is_file()), None)
    if found is None:
        raise DataError(
            f"no file of the task {task.name} in {where}: looked for {', '.join(names)}; name their folder with --data "
            f"or {DATA_VARIABLE}"
        )
    return found


def read_items(task: Task, path: Path, limit: int | None = None) -> list[Item]:
    """The questions in a file, the first `limit` of them."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit = {limit} must be at least 1")
    items = []
    for number, record in itertools.islice(_records(path), limit):
        try:
            items.append(task.item(record))
        except DataError as error:
            raise DataError(f"{path} line {number}: {error}") from error
    if not items:
        raise DataError(f"{path} holds no question of the task {task.name}")
    return items


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a file by line number."""
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _record(line, f"{path} line {number}")
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"cannot read {path} after line {number}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 after line {number}: {error.reason}") from error


def _record(line: str, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (RecursionError, ValueError) as error:  # also of what is too deep, or a number too long
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: holds a {type(record).__name__}, not an object")
    return record


def _opened(path: Path) -> TextIO:
    """A file of text, packed or not; Windows may have put a mark before it."""
    encoding = "utf-8-sig"
    return gzip.open(path, "rt", encoding=encoding) if path.suffix == ".gz" else path.open(encoding=encoding)
