"""`whimbrel plot RUN [RUN...]`: plot the training curves of runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot"]

PANELS = {"loss": "loss", "lr": "learning rate", "norm": "gradient norm", "speed": "tokens/s"}


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or their log.jsonl files.")],
    out: Annotated[
        Path | None, typer.Option(help="Output file, .png or .svg. (default: loss.png in the first run)")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Use tokens instead of steps on the x-axis.")] = False,
    what: Annotated[str, typer.Option(help="Panels to plot, in order.")] = ",".join(PANELS),
) -> None:
    """Plot training and validation loss, learning rate, gradient norm and speed."""
    from whimbrel.base.errors import ConfigError, DataError, MissingExtraError
    from whimbrel.base.files import atomic_file
    from whimbrel.train.log import log_path, read_log

    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise MissingExtraError("whimbrel plot", "matplotlib", "plot") from error

    panels = [name.strip() for name in what.split(",")]
    if unknown := [name for name in panels if name not in PANELS]:
        raise ConfigError(f"unknown panel '{unknown[0]}' in --what (choose from: {', '.join(PANELS)})")
    target = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "loss.png"
    if target.suffix not in (".png", ".svg"):
        raise ConfigError(f"expected --out to end in .png or .svg, got {target}")
    columns = 1 if len(panels) == 1 else 2
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(8, 4.5) if columns == 1 else (12, 3.5 * rows), layout="constrained")
    grid: list[Axes] = [figure.add_subplot(rows, columns, place) for place in range(1, len(panels) + 1)]
    for run in runs:
        log = log_path(run)
        lines = read_log(log)
        if not any(line["kind"] == "step" for line in lines):
            raise DataError(f"{log} has no steps to plot")
        name = log.parent.name if log.name == "log.jsonl" else log.stem
        start = next(line["after"] - 1 for line in lines if line["kind"] == "step")
        if tokens and start:
            print(f"{log} starts after step {start}: its tokens are counted from there")
        for axes, panel in zip(grid, panels, strict=True):
            _plot_panel(axes, panel, lines, name, tokens=tokens)
    for axes, panel in zip(grid, panels, strict=True):
        axes.set(xlabel="tokens" if tokens else "step", ylabel=PANELS[panel])
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    grid[0].legend()
    with atomic_file(target) as file:
        figure.savefig(file, format=target.suffix[1:], dpi=130)
    print(f"Wrote {target}")


def _plot_panel(axes: Axes, panel: str, lines: list[dict[str, Any]], name: str, *, tokens: bool) -> None:
    """Add the curve of one run to a panel. Values that are not finite (null in the log) become gaps."""
    from whimbrel.train.log import tokens_after

    seen = tokens_after(lines)

    def points(kind: str) -> tuple[list[int], list[float]]:
        own = [line for line in lines if line["kind"] == kind]
        places = [seen[line["after"]] if tokens else line["after"] for line in own]
        return places, [_value(panel, line) for line in own]

    label = f"{name}, train" if panel == "loss" else name
    (drawn,) = axes.plot(*points("step"), linewidth=1.2, alpha=0.8, label=label)
    if panel == "loss" and any(line["kind"] == "validation" for line in lines):
        label = f"{name}, validation"
        axes.plot(*points("validation"), "o--", markersize=4, color=drawn.get_color(), label=label)


def _value(panel: str, line: dict[str, Any]) -> float:
    if panel == "speed":
        return line["tokens"] / line["seconds"] if line.get("seconds") else math.nan
    value = line.get({"norm": "grad_norm"}.get(panel, panel))
    return math.nan if value is None else float(value)
