"""`whimbrel runs [DIRECTORY...]`: list runs and their state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["runs"]

LOG_PATTERNS = ("log.jsonl", "*/log.jsonl", "*/*/log.jsonl")
"""Where runs are searched: the directory itself, and two levels below."""
STATES = {"elsewhere": "on another host", "foreign": "other user"}
"""How states of `liveness` are displayed, where not by their own name."""


def runs(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or directories that contain runs. (default: runs)")
    ] = None,
) -> None:
    """List runs: running, finished, stopped (rerun the same command to resume) or dead (killed; resumes as well).

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
    from whimbrel.train.control import liveness
    from whimbrel.train.log import last_step

    log = run / "log.jsonl"
    last = last_step(log) or {}
    step, total = last.get("after", 0), last.get("total")
    state: str = liveness(run)
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
