"""TOML and `--a.b=c` overrides to frozen dataclasses; a misspelt or ill-typed key is refused with the nearest name."""

from whimbrel.config.overrides import apply_overrides
from whimbrel.config.schema import (
    Setting,
    build,
    check_choices,
    check_known,
    check_unused,
    convert,
    field_docs,
    list_settings,
    nearest,
    to_table,
)
from whimbrel.config.toml import dump_toml, load_toml

__all__ = [
    "Setting",
    "apply_overrides",
    "build",
    "check_choices",
    "check_known",
    "check_unused",
    "convert",
    "dump_toml",
    "field_docs",
    "list_settings",
    "load_toml",
    "nearest",
    "to_table",
]
