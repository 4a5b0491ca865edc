"""`whimbrel train CONFIG.toml [--section.name=value]`."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from whimbrel.cli.terminal import configure_logging

__all__ = ["train"]


def _list_settings(requested: bool) -> None:
    """Print every setting with its default and description."""
    from whimbrel.config import list_settings
    from whimbrel.models import preset_names
    from whimbrel.train import RunConfig

    if requested:
        names = ", ".join(preset_names())
        print(f"--model.preset\n    Start from a preset; other model settings override its fields. One of {names}.")
        for setting in list_settings(RunConfig):
            default = "" if setting.default in (None, "", ()) else f" (default {setting.default})"
            print(f"--{setting.name}{default}\n    {setting.doc}")
        raise typer.Exit


def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="TOML file of the run, such as configs/shakespeare-cpu.toml.")],
    plain: Annotated[bool, typer.Option("--plain", help="Print one line per step instead of a progress bar.")] = False,
    exit_143: Annotated[
        bool, typer.Option("--exit-143", help="Exit with code 143 instead of 0 after a signal.")
    ] = False,
    settings: Annotated[
        bool, typer.Option("--settings", is_eager=True, callback=_list_settings, help="List every setting and exit.")
    ] = False,
) -> None:
    """Train a model.

    Override any setting of the file with --section.name=value; none turns off an optional one. If the output directory
    contains a run, training resumes from its newest checkpoint. Ctrl-C finishes the step, saves and stops.
    """
    from whimbrel.train import Trainer, load_run_config
    from whimbrel.train.callbacks import ProgressCallback

    del settings  # handled by its callback
    configure_logging()
    loaded = load_run_config(config, context.args)
    trainer = Trainer.from_config(loaded, callbacks=[ProgressCallback(plain=plain)])
    trainer.train()
    _drop_unwritten_output()
    if trainer.received_signal is not None and exit_143:
        raise typer.Exit(143)


def _drop_unwritten_output() -> None:
    """Keep a run whose standard output failed (full disk, `| head`) from exiting with an error."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
