"""`--a.b=c` on the command line: one value of the configuration, set last."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from whimbrel.base.errors import ConfigError

__all__ = ["apply_overrides"]


def apply_overrides(table: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `table` with each `--a.b=c` set; `none` removes a value, so that its default holds."""
    result = copy.deepcopy(dict(table))
    for text in overrides:
        name, equals, raw = text.removeprefix("--").partition("=")
        if not text.startswith("--") or not equals or not all(name.split(".")):
            raise ConfigError(f"cannot read '{text}': an override is written --section.name=value")
        *sections, key = name.replace("-", "_").split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"cannot set '{name}': '{section}' is a single value, not a section")
        if raw == "none":
            target.pop(key, None)
        else:
            target[key] = _value(raw)
    return result


def _value(raw: str) -> Any:
    """What TOML reads from `raw`; a bare word is a text."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw
