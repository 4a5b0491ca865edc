"""`whimbrel runs [DIRECTORY...]` and `whimbrel control RUN ACTION`: list runs, and control a running one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["control", "runs"]

LOG_PATTERNS = ("log.jsonl", "*/log.jsonl", "*/*/log.jsonl")
"""Where to look for runs: the directory itself and two levels below."""
STATES = {"elsewhere": "on another host", "foreign": "other user"}
"""Display names of `run_status` states; other states are displayed unchanged."""


def runs(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or directories that contain runs. (default: runs)")
    ] = None,
) -> None:
    """List runs: running, finished, stopped (rerun the same command to resume) or dead (killed; can be resumed, too).

    A run on another machine is "on another host"; an unfinished run of another user is "other user".
    """
    from whimbrel.base.errors import DataError
    from whimbrel.cli.terminal import print_table

    given = directories or [Path("runs")]
    for directory in given:
        if not directory.is_dir():
            raise DataError(f"no such directory: {directory}; give the directories that contain your runs")
    found = sorted({log.parent for directory in given for pattern in LOG_PATTERNS for log in directory.glob(pattern)})
    if not found:
        print(f"no runs in {', '.join(map(str, given))}")
        return
    print_table(("run", "state", "step", "loss", "checkpoint", "age"), [_row(run) for run in found])


def _row(run: Path) -> tuple[str, ...]:
    from whimbrel.checkpoint import latest_checkpoint
    from whimbrel.train.control import run_status
    from whimbrel.train.log import last_step

    log = run / "log.jsonl"
    last = last_step(log) or {}
    step, total = last.get("after", 0), last.get("total")
    state: str = run_status(run)
    if state == "ended":
        state = "finished" if step == total else "stopped"
    loss, newest = last.get("loss"), latest_checkpoint(run)
    return (
        str(run),
        STATES.get(state, state),
        f"{step}/{'?' if total is None else total}",
        "-" if loss is None else f"{loss:.4f}",
        "-" if newest is None else newest.name,
        _format_age(time.time() - log.stat().st_mtime),
    )


def _format_age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def control(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    action: Annotated[str, typer.Argument(help="status, save, stop, save-stop or abort.")],
) -> None:
    """Show the status of a running training job, or make it save, stop or abort.

    The action takes effect after the current step. stop ends the run like its last step, with the configured
    evaluation and checkpoint; save-stop saves and ends without an evaluation; abort ends without either.
    """
    from whimbrel.base.errors import ConfigError
    from whimbrel.cli.terminal import print_table
    from whimbrel.train.control import ACTIONS, send_request

    if action not in ACTIONS:
        raise ConfigError(f"unknown action '{action}' (choose from: {', '.join(ACTIONS)})")
    reply = send_request(run, action)
    if action == "status":
        print_table(("", ""), _status_rows(reply["status"]))
    else:
        print(f"{run} (step {reply['step']}) {reply['message']}")


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
