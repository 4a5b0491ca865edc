"""`whimbrel plot RUN [RUN...]`: the loss curves of runs as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["plot"]


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or their log.jsonl files.")],
    out: Annotated[
        Path | None, typer.Option(help="The picture, .png or .svg; not given: loss.png in the first run.")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Put tokens, not steps, on the x-axis.")] = False,
) -> None:
    """Draw training and validation loss."""
    from whimbrel.base.errors import DataError, MissingExtraError
    from whimbrel.base.files import atomic_file
    from whimbrel.train import read_log

    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise MissingExtraError("a picture", "matplotlib", "plot") from error

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        log = run / "log.jsonl" if run.is_dir() else run
        if not log.is_file():
            raise DataError(f"{run} is not a run: it has no log.jsonl")
        lines = read_log(log)
        seen, x_of = 0, {0: 0}
        for line in lines:
            if line["kind"] == "step":
                seen += line["tokens"] if tokens else 1
                x_of[line["after"]] = seen
        points = {
            kind: [(x_of[i["after"]], i["loss"]) for i in lines if i["kind"] == kind] for kind in ("step", "validation")
        }
        if not points["step"]:
            raise DataError(f"{log} holds no steps: nothing to draw")
        name = log.parent.name if log.name == "log.jsonl" else log.stem
        (drawn,) = axes.plot(*zip(*points["step"], strict=True), linewidth=1.2, alpha=0.8, label=f"{name}, train")
        if points["validation"]:
            axes.plot(
                *zip(*points["validation"], strict=True),
                "o--",
                markersize=4,
                color=drawn.get_color(),
                label=f"{name}, validation",
            )
    axes.set(xlabel="tokens" if tokens else "step", ylabel="loss")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend()
    target = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "loss.png"
    if target.suffix not in (".png", ".svg"):
        raise DataError(f"cannot draw {target}: the picture ends in .png or .svg")
    with atomic_file(target) as file:
        figure.savefig(file, format=target.suffix[1:], dpi=130)
    print(f"Wrote {target}")
