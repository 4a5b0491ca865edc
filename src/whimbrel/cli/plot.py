"""`whimbrel plot`: loss, learning rate, gradient norm and speed of runs as an image, without importing torch."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from whimbrel.train.run_log import RunLog

__all__ = ["ENTRIES", "REWARD_PANELS", "plot"]

PANELS = {
    "loss": "loss", "lr": "learning rate", "norm": "gradient norm", "speed": "tokens/s", "memory": "peak memory (GiB)",
}  # fmt: skip
REWARD_PANELS = {"margin": "reward margin", "accuracy": "reward accuracy"}
"""Plotted by default if a run trained on preference pairs."""
LABELS = PANELS | REWARD_PANELS
ENTRIES = {
    "norm": "grad_norm", "memory": "peak_memory", "margin": "rewards/margins", "accuracy": "rewards/accuracies",
}  # fmt: skip
"""Keys in log.jsonl of panels with a different name; in validation lines, they have the prefix `eval_`."""
SMOOTHED = {"loss", "norm", "speed", *REWARD_PANELS}
VALIDATED = {"loss", *REWARD_PANELS}
SMOOTHING = 0.02
"""Default smoothing, as a fraction of the steps of the longest run."""
MAX_TITLE_RUNS = 4
VIEWER_TIMEOUT = 5.0
"""Seconds to wait for xdg-open, which without a desktop may run until the viewer is closed."""
VALIDATION_STYLE: dict[str, Any] = {"linestyle": "--", "marker": "o", "markersize": 5, "markeredgecolor": "white"}


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or their log.jsonl files.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Output file, .png or .svg. (default: loss.png in the run, or next to the first of several)"),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Use tokens instead of steps on the x-axis.")] = False,
    panels: Annotated[
        str | None,
        typer.Option(
            help=f"Panels to plot, in order (comma-separated): {', '.join(LABELS)}. (default: all that have data)"
        ),
    ] = None,
    smooth: Annotated[
        int | None,
        typer.Option(min=1, help="Smooth curves over about N steps; 1 turns it off. (default: 2% of the longest run)"),
    ] = None,
    open_file: Annotated[bool, typer.Option("--open", help="Open the image in the default viewer.")] = False,
) -> None:
    """Plot loss, learning rate, gradient norm, speed, memory and, for preference training, rewards."""
    from whimbrel.base.errors import ConfigError, DataError, MissingExtraError
    from whimbrel.base.files import atomic_file
    from whimbrel.train.run_log import RunLog

    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("whimbrel plot", "matplotlib", "plot") from error

    requested = [] if panels is None else [name.strip() for name in panels.split(",")]
    if unknown := [name for name in requested if name not in LABELS]:
        raise ConfigError(f"unknown panel '{unknown[0]}' in --panels (choose from: {', '.join(LABELS)})")
    folder = runs[0] if runs[0].is_dir() else runs[0].parent
    target = out or (folder if len(runs) == 1 else folder.parent) / "loss.png"
    if target.suffix not in (".png", ".svg"):
        raise ConfigError(f"expected --out to end in .png or .svg, got {target}")
    logs = [RunLog(run) for run in runs]
    if empty := next((log for log in logs if not log.steps), None):
        raise DataError(f"{empty.path} has no steps to plot")
    for log in logs:
        if tokens and log.start:
            print(f"{log.path} starts after step {log.start}: its tokens are counted from there")

    logged = [panel for panel in LABELS if panel == "loss" or _is_logged(panel, logs)]
    if absent := [name for name in requested if name not in logged]:
        owner = str(runs[0]) if len(runs) == 1 else "no run"
        verb = "does not log" if len(runs) == 1 else "logs"
        raise ConfigError(f"{owner} {verb} '{absent[0]}' of --panels (logged panels: {', '.join(logged)})")
    names = requested or logged
    figure = Figure(layout="constrained")
    _draw(
        figure,
        logs,
        names,
        tokens=tokens,
        span=smooth or max(1, round(SMOOTHING * max(len(log.steps) for log in logs))),
    )
    with atomic_file(target) as file:
        figure.savefig(file, format=target.suffix[1:], dpi=130)
    print(f"wrote {target}")
    if open_file and not _open(target):
        print(f"could not open {target}")


def _open(file: Path) -> bool:
    """Open a file in the default viewer; False if there is none."""
    if sys.platform in ("darwin", "win32"):
        return typer.launch(str(file)) == 0
    try:  # typer.launch neither waits for the exit code of xdg-open nor hides its messages
        viewer = subprocess.Popen(["xdg-open", file], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        return viewer.wait(VIEWER_TIMEOUT) == 0
    except OSError:
        return False
    except subprocess.TimeoutExpired:
        return True


def _draw(figure: Figure, logs: Sequence[RunLog], panels: Sequence[str], *, tokens: bool, span: int) -> None:
    """One panel per metric, one color per run, and a legend with the final losses below the panels."""
    from matplotlib.ticker import EngFormatter

    columns = 1 if len(panels) == 1 else 2
    rows = math.ceil(len(panels) / columns)
    handles = _legend(logs, span)
    legend_rows = math.ceil(len(handles) / (columns + 1))
    figure.set_size_inches(8 if columns == 1 else 12, (4.5 if columns == 1 else 3.5 * rows) + 0.25 * legend_rows)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns + 1, frameon=False)
    for index, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, index)
        for log, color in zip(logs, _colors(logs), strict=True):
            _draw_run(axes, panel, log, color, tokens=tokens, span=span, single=len(logs) == 1)
        axes.set(xlabel="tokens" if tokens else "step", ylabel=LABELS[panel])
        if panel in ("speed", "memory"):  # nearly constant: other limits would exaggerate the differences
            axes.set_ylim(0, 1.1 * (axes.dataLim.ymax or 1))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    names = _names(logs)
    title = " · ".join(names) if len(names) <= MAX_TITLE_RUNS else f"{len(names)} runs"
    figure.suptitle(f"{title} (smoothed over {span} steps)" if span > 1 and SMOOTHED & set(panels) else title)


def _draw_run(axes: Axes, panel: str, log: RunLog, color: Any, *, tokens: bool, span: int, single: bool) -> None:
    """Add the curve of a run to a panel; non-finite values (null in the log) become gaps."""
    from whimbrel.train.run_log import smooth

    def xs(lines: list[dict[str, Any]]) -> list[int]:
        return [log.tokens[line["after"]] if tokens else line["after"] for line in lines]

    values = [_value(panel, line) for line in log.steps]
    smoothed = panel in SMOOTHED and span > 1
    if smoothed and single:  # unsmoothed curves of several runs would hide each other
        axes.plot(xs(log.steps), _with_gaps(values), linewidth=0.8, alpha=0.3, color=color)
    curve = smooth(values, span) if smoothed else _with_gaps(values)
    axes.plot(xs(log.steps), curve, linewidth=1.4, color=color)
    if panel in VALIDATED and log.validations:
        held_out = _with_gaps([_value(panel, line) for line in log.validations])
        axes.plot(xs(log.validations), held_out, color="C1" if single else color, zorder=5, **VALIDATION_STYLE)


def _legend(logs: Sequence[RunLog], span: int) -> list[Line2D]:
    """Entries with the final losses; the train loss is the end of the smoothed curve."""
    from matplotlib.lines import Line2D

    from whimbrel.train.run_log import smooth

    losses = []
    for log in logs:
        train = smooth([line["loss"] for line in log.steps], span)[-1]
        held_out = [f"validation {_format(line['loss'])}" for line in log.validations[-1:]]
        losses.append([f"train {_format(train)}", *held_out])
    if len(logs) == 1:
        styles: list[dict[str, Any]] = [{"color": "C0"}, {"color": "C1", **VALIDATION_STYLE}]
        return [Line2D([], [], label=label, **style) for label, style in zip(losses[0], styles, strict=False)]
    entries = [
        Line2D([], [], color=color, label=f"{name}: {', '.join(values)}")
        for name, color, values in zip(_names(logs), _colors(logs), losses, strict=True)
    ]
    if any(log.validations for log in logs):
        entries.append(Line2D([], [], color="gray", label="train"))
        entries.append(Line2D([], [], color="gray", label="validation", **VALIDATION_STYLE))
    return entries


def _colors(logs: Sequence[RunLog]) -> list[Any]:
    from matplotlib import colormaps

    if len(logs) <= 10:
        return [f"C{index}" for index in range(len(logs))]
    return [colormaps["turbo"]((index + 0.5) / len(logs)) for index in range(len(logs))]


def _with_gaps(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _is_logged(panel: str, logs: Sequence[RunLog]) -> bool:
    return any(_value(panel, line) is not None for log in logs for line in log.steps)


def _value(panel: str, line: dict[str, Any]) -> float | None:
    if panel == "speed":
        return line["tokens"] / line["seconds"] if line.get("seconds") else None
    entry = ENTRIES.get(panel, panel)
    value = line.get(entry, line.get(f"eval_{entry}"))
    return value / 2**30 if panel == "memory" and value is not None else value


def _names(logs: Sequence[RunLog]) -> list[str]:
    """The names of the runs, or their paths where two have the same name."""
    names = [log.name for log in logs]
    return [name if names.count(name) == 1 else str(log.path.parent) for name, log in zip(names, logs, strict=True)]


def _format(loss: float | None) -> str:
    return "not finite" if loss is None or math.isnan(loss) else f"{loss:.4f}"
