"""Read TOML files, write the TOML subset that configs use, and apply `--a.b=c` overrides."""

from __future__ import annotations

import copy
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from whimbrel.base.errors import ConfigError

__all__ = ["Override", "apply_overrides", "dump_toml", "load_toml"]


def load_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Parse a TOML file. Raises ConfigError with the path and, for a syntax error, the line."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise ConfigError(f"no such configuration file: {path}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"expected a TOML file, got a directory: {path}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{path} is not valid TOML: {reason}") from error


def dump_toml(table: Mapping[str, Any], header: str = "") -> str:
    """TOML text for a table of scalars, lists of scalars, nested tables and lists of tables."""
    lines = [f"[{header}]"] if header else []
    return _dump(table, header, lines)


class Override(str):
    """An override value as typed. It is parsed once the type of its setting is known: a path `2024` stays a string."""

    __slots__ = ()

    def parsed(self) -> Any:
        """The value parsed as TOML; the string itself if it is not valid TOML (a bare word)."""
        try:
            return tomllib.loads(f"value = {self}")["value"]
        except (ValueError, RecursionError):
            return str(self)

    def text(self) -> str:
        """The string, without TOML quotes."""
        value = self.parsed()
        return value if isinstance(value, str) else str(self)

    def items(self) -> list[Any]:
        """The list: a TOML list, or values separated by commas."""
        value = self.parsed()
        if isinstance(value, list):
            return value
        text = self.text()
        return [Override(item.strip()) for item in text.split(",")] if text else []


def apply_overrides(table: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `table` with each `--a.b=c` applied; `build` resolves the value `none` (see `resolve_none`)."""
    result = copy.deepcopy(dict(table))
    for text in overrides:
        name, equals, raw = text.removeprefix("--").partition("=")
        if not text.startswith("--") or not all(name.split(".")):
            raise ConfigError(f"expected --section.name=value, got '{text}'")
        if not equals:
            raise ConfigError(f"expected a value for {text}: pass {text}=VALUE")
        *sections, key = name.replace("-", "_").split(".")
        target = result
        for section in sections:
            if target.get(section, "none") == "none":
                target[section] = {}
            target = target[section]
            if not isinstance(target, dict):
                raise ConfigError(f"cannot set '{name}': '{section}' is a single value, not a section")
        target[key] = Override(raw)
    return result


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
