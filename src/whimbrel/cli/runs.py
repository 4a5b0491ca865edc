"""`whimbrel runs [FOLDER...]`: the runs there are, and how each is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["runs"]

DEPTH = ("log.jsonl", "*/log.jsonl", "*/*/log.jsonl")
"""Where a run is looked for: the folder itself, and two levels below."""


def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders that hold runs, or runs; not given: runs.")
    ] = None,
) -> None:
    """List runs: running, finished, stopped (the same command goes on) or dead (killed; it goes on as well).

    One that runs on another machine is elsewhere, and one that another user has begun and not ended is not yours.
    """
    from whimbrel.base.errors import DataError
    from whimbrel.cli.terminal import print_table

    given = folders or [Path("runs")]
    for folder in given:
        if not folder.is_dir():
            raise DataError(f"no folder {folder}: name the folders that hold your runs")
    found = sorted({log.parent for folder in given for depth in DEPTH for log in folder.glob(depth)})
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
    if state == "foreign":
        state = "not yours"
    elif state == "ended":
        state = "finished" if step == total else "stopped"
    loss, newest = last.get("loss"), latest_checkpoint(run)
    return (
        str(run), state, f"{step}/{'?' if total is None else total}", "-" if loss is None else f"{loss:.4f}",
        "-" if newest is None else newest.name, _age(time.time() - log.stat().st_mtime),
    )  # fmt: skip


def _age(seconds: float) -> str:
    """How long ago, in the unit that a person would use."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
