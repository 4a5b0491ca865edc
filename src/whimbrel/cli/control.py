"""`whimbrel control RUN status|save|stop|save-stop|abort`: query or stop a running training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["control"]


def control(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    action: Annotated[str, typer.Argument(help="status, save, stop, save-stop or abort.")],
) -> None:
    """Show the status of a running training, or make it save, stop or abort.

    The action takes effect after the current step. stop ends the run like its last step, with the configured
    evaluation and checkpoint; save-stop saves and ends without an evaluation; abort ends without either.
    """
    from whimbrel.base.errors import ConfigError
    from whimbrel.cli.terminal import print_table
    from whimbrel.train.control import VERBS, ask

    if action not in VERBS:
        raise ConfigError(f"unknown action '{action}' (choose from: {', '.join(VERBS)})")
    reply = ask(run, action)
    if action == "status":
        print_table(("", ""), _status_rows(reply["status"]))
    else:
        print(f"{run}, {reply['step']} steps done: {reply['says']}")


def _status_rows(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Table rows of a status; values that are not known yet are omitted."""
    rows = [("process", str(status["pid"])), ("step", f"{status['step']}/{status['max_steps']}")]
    formats = {"loss": "{:.4f}", "lr": "{:.2e}", "tokens_per_second": "{:,.0f}", "checkpoint": "{}"}
    names = {"tokens_per_second": "tokens/s"}
    rows += [
        (names.get(key, key), form.format(status[key])) for key, form in formats.items() if status[key] is not None
    ]
    if status["eta_seconds"] is not None:
        minutes, seconds = divmod(round(status["eta_seconds"]), 60)
        rows.append(("time left", f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"))
    return rows
