"""`whimbrel control RUN status|save|stop|save-stop|abort`: talk to a running job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["control"]


def control(
    run: Annotated[Path, typer.Argument(help="The directory of the run.")],
    verb: Annotated[str, typer.Argument(help="status, save, stop, save-stop or abort.")],
) -> None:
    """Ask a running job how it is, or to save, stop or abort.

    It obeys after the step under way. stop ends the run as its last step would, with the evaluation and the save that
    the settings call for; save-stop saves and ends without an evaluation; abort ends without either.
    """
    from whimbrel.base.errors import ConfigError
    from whimbrel.cli.terminal import print_table
    from whimbrel.train.control import VERBS, ask

    if verb not in VERBS:
        raise ConfigError(f"'{verb}' is nothing to ask of a run: {', '.join(VERBS)} are")
    reply = ask(run, verb)
    if verb == "status":
        print_table(("", ""), _lines(reply["status"]))
    else:
        print(f"{run}, {reply['step']} steps done: {reply['says']}")


def _lines(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The status in words; what is not known yet is left out."""
    lines = [("process", str(status["pid"])), ("step", f"{status['step']}/{status['max_steps']}")]
    forms = {"loss": "{:.4f}", "lr": "{:.2e}", "tokens_per_second": "{:,.0f}", "checkpoint": "{}"}
    names = {"tokens_per_second": "tokens/s"}
    lines += [(names.get(key, key), form.format(status[key])) for key, form in forms.items() if status[key] is not None]
    if status["eta_seconds"] is not None:
        minutes, seconds = divmod(round(status["eta_seconds"]), 60)
        lines.append(("time left", f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"))
    return lines
