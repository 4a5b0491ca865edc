"""`--a.b=c` on the command line: one value of the configuration, set last."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from whimbrel.base.errors import ConfigError

__all__ = ["Override", "apply_overrides"]


class Override(str):
    """A value as it was typed; the type of its setting decides how it is read (a path called 2024 is no number)."""

    __slots__ = ()

    def parsed(self) -> Any:
        """What TOML reads from it; a bare word is a text."""
        try:
            return tomllib.loads(f"value = {self}")["value"]
        except (ValueError, RecursionError):
            return str(self)

    def text(self) -> str:
        """The text it stands for, quoted or not."""
        value = self.parsed()
        return value if isinstance(value, str) else str(self)

    def items(self) -> list[Any]:
        """The list it stands for: as TOML writes one, or its values with commas between them."""
        value = self.parsed()
        if isinstance(value, list):
            return value
        text = self.text()
        return [Override(item.strip()) for item in text.split(",")] if text else []


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
            target[key] = Override(raw)
    return result
