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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def dump_toml(table: Mapping[str, Any], header: str = "") -> str:
    """TOML text for a table of scalars, lists of scalars and nested tables."""
    lines = [f"[{header}]"] if header else []
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines += [f"{key} = {_scalar(value)}" for key, value in table.items() if key not in nested]
    parts = ["\n".join(lines)] if lines else []
    parts += [dump_toml(value, f"{header}.{key}" if header else key).rstrip("\n") for key, value in nested.items()]
    return "\n\n".join(parts) + "\n"


def _scalar(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
