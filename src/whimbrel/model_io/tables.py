"""JSON objects in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whimbrel.base.errors import CheckpointError
from whimbrel.base.files import parse_json

__all__ = ["read_table", "write_table"]


def read_table(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        table = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}: give a model directory as Hugging Face lays it out"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} holds a {type(table).__name__}, not an object")
    return table


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write an object as JSON."""
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
