"""Read TOML with the line of a fault in the message; write the small subset of TOML that configurations need."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from typing import Any

from whimbrel.base.errors import ConfigError

__all__ = ["dump_toml", "load_toml"]


def load_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The table in a TOML file."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise ConfigError(f"no such configuration file: {path}") from error
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError, and integers of thousands of digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{path} is not valid TOML: {reason}") from error


def dump_toml(table: Mapping[str, Any], header: str = "") -> str:
    """TOML text for a table of scalars, lists of scalars, nested tables and lists of tables."""
    lines = [f"[{header}]"] if header else []
    return _dump(table, header, lines)


def _dump(table: Mapping[str, Any], header: str, lines: list[str]) -> str:
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping) or _is_tables(value)}
    lines += [f"{key} = {_scalar(value)}" for key, value in table.items() if key not in nested]
    parts = ["\n".join(lines)] if lines else []
    for key, value in nested.items():
        name = f"{header}.{key}" if header else key
        if isinstance(value, Mapping):
            parts.append(dump_toml(value, name).rstrip("\n"))
        else:
            parts += [_dump(item, name, [f"[[{name}]]"]).rstrip("\n") for item in value]
    return "\n\n".join(parts) + "\n"


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _scalar(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
