"""Recipes: configuration files that ship with the package, found by name.

The comment at the top of a recipe starts with a one-line summary. `whimbrel recipes` lists lines such as `# loss: 4.32`
in it: the required data, and measured figures. Where the data is a text that comes with the package, the comment has
the commands that prepare it, which `whimbrel train` runs.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from whimbrel.base.errors import ConfigError
from whimbrel.base.files import broken_link
from whimbrel.config.schema import did_you_mean

__all__ = ["Recipe", "config_file", "read_recipe", "recipe_files"]

DIRECTORY = Path(__file__).parents[1] / "recipes"
FIGURE = re.compile(r"# (data|loss|memory|time): +(\S.*)")
COMMAND = re.compile(r"#   (whimbrel (?:tokenizer train|prepare) .*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The header of a recipe; figures that were not measured are None."""

    summary: str
    data: str
    """The data that the recipe needs."""
    loss: str | None = None
    """Validation loss per token after the last step."""
    memory: str | None = None
    """Peak memory."""
    time: str | None = None
    """Duration of the run, and the hardware."""
    commands: tuple[str, ...] = ()
    """Commands that prepare the data, if it comes with the package."""


def recipe_files() -> dict[str, Path]:
    """The files of all recipes by name, sorted."""
    return {path.stem: path for path in sorted(DIRECTORY.glob("*.toml"))}


def read_recipe(file: Path) -> Recipe:
    """The comment at the top of a recipe."""
    lines = file.read_text(encoding="utf-8").splitlines()
    header = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    figures = {match[1]: match[2] for line in header if (match := FIGURE.fullmatch(line))}
    commands = tuple(match[1] for line in header if (match := COMMAND.fullmatch(line)))
    return Recipe(summary=header[0].removeprefix("# "), commands=commands, **figures)


def config_file(name: str | os.PathLike[str], others: Collection[str] = ()) -> Path:
    """The file at the path `name`, or else the recipe of that name.

    Raises ConfigError if there is neither, with a suggestion from the recipes and `others`.
    """
    path, recipes = Path(name), recipe_files()
    if str(name) in recipes and not path.is_file():
        return recipes[str(name)]
    if path.exists() and not path.is_dir():
        return path
    if found := [file for file in (Path(f"{path}.toml"), path / "config.toml") if file.is_file()]:
        kind = "got a directory" if path.is_dir() else "no such file"
        raise ConfigError(f"expected a TOML file, {kind}: {path}: did you mean {found[0]}?")
    if path.is_dir():
        return path
    if path.name == str(name) and not path.suffix and not path.is_symlink():
        raise ConfigError(f"no such configuration file or recipe: {name}{did_you_mean(str(name), {*recipes, *others})}")
    hint = f": did you mean the recipe '{path.stem}'?" if path.stem in recipes else broken_link(path)
    raise ConfigError(f"no such configuration file: {path}{hint}")
