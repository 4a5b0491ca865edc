"""TOML and `--a.b=c` overrides to frozen dataclasses; a misspelt or ill-typed key is refused with the nearest name."""

from whimbrel.config.overrides import apply_overrides
from whimbrel.config.schema import build, check_known, field_docs, nearest, to_table
from whimbrel.config.toml import dump_toml, load_toml

__all__ = [
    "apply_overrides",
    "build",
    "check_known",
    "dump_toml",
    "field_docs",
    "load_toml",
    "nearest",
    "to_table",
]
