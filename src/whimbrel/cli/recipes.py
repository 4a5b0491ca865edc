"""Recipes that come with the package: list them, copy one to edit it, prepare the data of one."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from whimbrel.cli.terminal import escape_controls, print_table

__all__ = ["complete_config", "complete_recipe", "init", "prepare_data", "recipe_rows", "recipes"]


def complete_recipe(incomplete: str) -> list[str]:
    """Shell completion of the name of a recipe."""
    from whimbrel.config import recipe_files

    return [name for name in recipe_files() if name.startswith(incomplete)]


def complete_config(incomplete: str) -> list[str]:
    """Shell completion of a recipe or TOML file; if there is none, shells complete any path."""
    files = sorted(file.name for file in Path().glob("*.toml") if file.name.startswith(incomplete))
    return [*files, *complete_recipe(incomplete)]


def recipes() -> None:
    """List the built-in recipes: configs that you can run by name, or copy and edit.

    Model sizes are in parameters; losses are final validation losses per token. Losses and times were measured on the
    data and hardware stated in the recipe; memory marked with ~ is predicted. A dash means that the value depends on
    your model and data, or was not measured.
    """
    rows = recipe_rows()
    print_table(("recipe", "model", "data", "loss", "memory", "time"), (row[:-1] for row in rows))
    print()
    print_table(("", ""), ((f"{row[0]}:", row[-1]) for row in rows))
    print()
    print("whimbrel train NAME runs a recipe; whimbrel init NAME copies it to a file to edit.")


def recipe_rows() -> list[tuple[str, ...]]:
    """Name, model size, data, loss, memory, time and summary of each recipe."""
    from whimbrel.config import read_recipe, recipe_files

    rows = []
    for name, file in recipe_files().items():
        recipe = read_recipe(file)
        figures = (figure or "-" for figure in (recipe.loss, recipe.memory, recipe.time))
        rows.append((name, _model_size(file), recipe.data, *figures, recipe.summary))
    return rows


def _model_size(file: Path) -> str:
    """The number of parameters, unless the user chooses the model (fine-tuning)."""
    import torch

    from whimbrel.config import load_toml
    from whimbrel.models import GPT
    from whimbrel.train import load_run_config

    if not load_toml(file)["model"].keys() & {"preset", "num_layers"}:
        return "yours"
    with torch.device("meta"):
        return f"{GPT(load_run_config(file).model.architecture).num_parameters() / 1e6:.3g}M"


def init(
    name: Annotated[
        str, typer.Argument(help="Name of a recipe; `whimbrel recipes` lists them.", autocompletion=complete_recipe)
    ],
    path: Annotated[
        Path | None, typer.Argument(help="File to write, or a directory for it. (default: NAME.toml)")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Copy a recipe to a TOML file for editing.

    The copy trains in runs/FILE, where FILE is its name without .toml, so that it does not resume a run of the recipe.
    Comments in the file explain the settings; `whimbrel train --settings` lists all of them.
    """
    from whimbrel.base.errors import ConfigError
    from whimbrel.base.files import atomic_file
    from whimbrel.config import did_you_mean, recipe_files

    recipes = recipe_files()
    if name not in recipes:
        raise ConfigError(f"unknown recipe '{name}'{did_you_mean(name, recipes)}")
    path = Path() if path is None else path
    target = path / f"{name}.toml" if path.is_dir() else path
    if target.exists() and not force:
        raise ConfigError(f"{target} exists: pass --force to replace it, or another path")
    output = f"output_dir = {json.dumps(f'runs/{target.stem}', ensure_ascii=False)}"
    text = re.sub(
        r'^output_dir = ".*?"', lambda _: output, recipes[name].read_text("utf-8"), count=1, flags=re.MULTILINE
    )
    with atomic_file(target) as file:
        file.write(text.encode())
    print(escape_controls(f"Wrote {target}. Edit it, then run: whimbrel train {shlex.quote(str(target))}"))


def prepare_data(data: Path | tuple[str, ...]) -> None:
    """If `data` is the directory of a recipe whose text comes with the package, prepare its shards unless they exist.

    Copies of the recipe work too: not the comment of the given file is read, but that of the recipe.
    """
    from whimbrel.config import load_toml, read_recipe, recipe_files

    if any(Path(str(data)).glob("*.bin")) or "RANK" in os.environ:
        return
    files = [file for file in recipe_files().values() if load_toml(file)["data"].get("path") == str(data)]
    for command in (command for file in files for command in read_recipe(file).commands):
        print(f"$ {command}", flush=True)
        code = subprocess.run([sys.executable, "-m", *shlex.split(command)], check=False).returncode
        if code:
            raise typer.Exit(code)
