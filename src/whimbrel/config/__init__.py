"""TOML files and `--a.b=c` overrides to frozen dataclasses. Unknown or mistyped keys are errors with a suggestion."""

from whimbrel.config.recipes import Recipe, config_file, read_recipe, recipe_files
from whimbrel.config.schema import (
    Setting,
    build,
    check_choices,
    check_known,
    check_unused,
    convert,
    did_you_mean,
    did_you_mean_path,
    field_docs,
    list_settings,
    not_one_of,
    resolve_none,
    suggest,
    to_table,
)
from whimbrel.config.toml import apply_overrides, dump_toml, load_toml

__all__ = [
    "Recipe",
    "Setting",
    "apply_overrides",
    "build",
    "check_choices",
    "check_known",
    "check_unused",
    "config_file",
    "convert",
    "did_you_mean",
    "did_you_mean_path",
    "dump_toml",
    "field_docs",
    "list_settings",
    "load_toml",
    "not_one_of",
    "read_recipe",
    "recipe_files",
    "resolve_none",
    "suggest",
    "to_table",
]
