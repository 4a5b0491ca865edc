"""`whimbrel runs`, `control`, `compare` and `plot`: list, control and compare training runs, without torch."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["compare", "control", "plot", "runs"]

PANELS = {"loss": "loss", "lr": "learning rate", "norm": "gradient norm", "speed": "tokens/s"}
REWARD_PANELS = {"margin": "reward margin", "accuracy": "reward accuracy"}
"""Plotted by default if a run has preference pairs."""
ENTRIES = {"norm": "grad_norm", "margin": "rewards/margins", "accuracy": "rewards/accuracies"}
"""Entries of log.jsonl whose names are not those of the panels; those of validations start with `eval_`."""
LOG_PATTERNS = ("log.jsonl", "*/log.jsonl", "*/*/log.jsonl")
"""Where to look for runs: the directory itself and two levels below."""


def runs(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or directories that contain runs. (default: runs)")
    ] = None,
) -> None:
    """List runs: running, finished, stopped (rerun the same command to resume) or dead (killed; can be resumed).

    "other host" is a run on another machine, "other user" an unfinished run of another user.
    """
    from whimbrel.base.errors import DataError
    from whimbrel.cli.terminal import print_table

    roots = directories or [Path("runs")]
    for directory in roots:
        if not directory.is_dir():
            raise DataError(f"no such directory: {directory}; pass the directories that contain your runs")
    run_directories = sorted(
        {log.parent for directory in roots for pattern in LOG_PATTERNS for log in directory.glob(pattern)}
    )
    if not run_directories:
        print(f"no runs in {', '.join(map(str, roots))}")
        return
    print_table(("run", "state", "step", "loss", "checkpoint", "age"), [_row(run) for run in run_directories])


def _row(run: Path) -> tuple[str, ...]:
    from whimbrel.checkpoint import latest_checkpoint
    from whimbrel.train.control import run_status
    from whimbrel.train.run_directory import last_step

    log = run / "log.jsonl"
    last = last_step(log) or {}
    step, total = last.get("after", 0), last.get("total")
    state: str = run_status(run)
    if state == "ended":
        state = "finished" if step == total else "stopped"
    loss, newest = last.get("loss"), latest_checkpoint(run)
    return (
        str(run),
        state.replace("-", " "),
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

    The action takes effect after the current step. stop ends the run as if it had reached its last step, with the
    configured evaluation and checkpoint; save-stop saves and ends without an evaluation; abort ends without either.
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


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run directories, or their log.jsonl files.")],
) -> None:
    """Show which settings differ, the losses and speed of each run, and whether the losses are bit-identical."""
    from whimbrel.base.errors import ConfigError
    from whimbrel.cli.terminal import print_table

    if len(runs) < 2:
        raise ConfigError(f"expected two or more runs, got only {runs[0]}")
    curves = [Curve.read(run) for run in runs]
    names = [str(run) for run in runs]
    if different := _different_settings([_settings(run) for run in runs]):
        print_table(("setting", *names), different)
        print()
    print_table(("", *names), _metric_rows(curves))


@dataclass(frozen=True, slots=True)
class Curve:
    """The steps and validations in the log of a run, and the number of tokens before each."""

    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    tokens: dict[int, int]
    """Tokens by step, counted from the start of the log; a run resumed in another directory has no earlier steps."""

    @classmethod
    def read(cls, run: Path) -> Curve:
        """Read the log of a run. Raises DataError if it has no steps."""
        from whimbrel.base.errors import DataError
        from whimbrel.train.run_directory import log_path, read_log, tokens_after

        lines = read_log(log_path(run))
        steps = [line for line in lines if line["kind"] == "step"]
        if not steps:
            raise DataError(f"{log_path(run)} has no steps to compare")
        return cls(steps, [line for line in lines if line["kind"] == "validation"], tokens_after(lines))

    @property
    def start(self) -> int:
        """Number of steps before the first one in the log."""
        return int(self.steps[0]["after"]) - 1

    @property
    def total(self) -> int:
        """Tokens of all steps in the log."""
        return self.tokens[self.steps[-1]["after"]]

    @property
    def seconds(self) -> float:
        """Time spent in training steps."""
        return sum(float(line.get("seconds", 0.0)) for line in self.steps)

    def up_to(self, tokens: int) -> Curve:
        """The part of the curve within the first `tokens` tokens."""

        def within(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [line for line in lines if self.tokens[line["after"]] <= tokens]

        return Curve(within(self.steps), within(self.validations), self.tokens)


def _metric_rows(curves: list[Curve]) -> list[tuple[str, ...]]:
    """One row per metric."""
    rows = [
        ("steps", *(f"{curve.steps[-1]['after']:,}" for curve in curves)),
        ("tokens", *(f"{curve.total:,}{f' since step {curve.start:,}' * (curve.start > 0)}" for curve in curves)),
        ("train loss, last", *(_last(curve.steps) for curve in curves)),
        ("train loss, best", *(_best(curve.steps) for curve in curves)),
        ("validation loss, last", *(_last(curve.validations) for curve in curves)),
        ("validation loss, best", *(_best(curve.validations) for curve in curves)),
        ("tokens/s", *(f"{curve.total / curve.seconds:,.0f}" if curve.seconds else "-" for curve in curves)),
        ("training time", *(f"{curve.seconds:.1f} s" for curve in curves)),
    ]
    rows += [row for row in _finetuning_rows(curves) if set(row[1:]) != {"-"}]
    shortest = min(curve.total for curve in curves)
    comparable = all(curve.start == curves[0].start for curve in curves)  # otherwise token counts start differently
    if comparable and any(curve.total != shortest for curve in curves):
        short = [curve.up_to(shortest) for curve in curves]
        rows.append((f"train loss at {shortest:,} tokens", *(_last(curve.steps) for curve in short)))
        rows.append((f"validation loss at {shortest:,} tokens", *(_last(curve.validations) for curve in short)))
    return [
        *rows,
        ("losses compared with the first run", "-", *(_compare_losses(curves[0], curve) for curve in curves[1:])),
    ]


def _finetuning_rows(curves: list[Curve]) -> list[tuple[str, ...]]:
    """Supervised tokens and rewards, where there are any."""
    supervised = [sum(line.get("supervised_tokens", 0) for line in curve.steps) for curve in curves]
    speeds = zip(supervised, curves, strict=True)
    rows = [("supervised tokens/s", *(f"{n / c.seconds:,.0f}" if n and c.seconds else "-" for n, c in speeds))]
    for panel, name in REWARD_PANELS.items():
        rows.append((f"train {name}, last", *(_metric(curve.steps, ENTRIES[panel]) for curve in curves)))
        validated = (_metric(curve.validations, f"eval_{ENTRIES[panel]}") for curve in curves)
        rows.append((f"validation {name}, last", *validated))
    return rows


def _metric(lines: list[dict[str, Any]], entry: str) -> str:
    value = lines[-1].get(entry) if lines else None
    return "-" if value is None else f"{value:.4f}"


def _last(lines: list[dict[str, Any]]) -> str:
    return _loss(lines[-1]) if lines else "-"


def _best(lines: list[dict[str, Any]]) -> str:
    """The lowest finite loss and its step; a loss that is not finite is null in the log."""
    best = min((line for line in lines if line["loss"] is not None), key=lambda line: line["loss"], default=None)
    return "-" if best is None else f"{_loss(best)} after {best['after']:,}"


def _loss(line: dict[str, Any]) -> str:
    return "not finite" if line["loss"] is None else f"{line['loss']:.4f}"


def _compare_losses(first: Curve, other: Curve) -> str:
    """Whether the losses are bit-identical, and the first step where they differ."""
    ours = {line["after"]: line["loss"] for line in first.steps}
    theirs = {line["after"]: line["loss"] for line in other.steps}
    shared = sorted(ours.keys() & theirs.keys())
    different = next((after for after in shared if ours[after] != theirs[after]), None)
    if different is not None:
        return f"first differ at step {different:,}"
    if not shared:
        return "no step in common"
    return f"identical in all {len(shared):,} steps" if len(shared) > 1 else "identical in the only common step"


def _settings(run: Path) -> dict[str, str]:
    """The settings of a run by dotted name; empty if it has no config.toml."""
    from whimbrel.config import load_toml

    path = (run if run.is_dir() else run.parent) / "config.toml"
    return _flat(load_toml(path)) if path.is_file() else {}


def _flat(table: dict[str, Any], section: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in table.items():
        flat |= _flat(value, f"{section}{name}.") if isinstance(value, dict) else {f"{section}{name}": str(value)}
    return flat


def _different_settings(settings: list[dict[str, str]]) -> list[tuple[str, ...]]:
    """One row per setting that differs between runs, except for the output directory."""
    names = dict.fromkeys(name for run_settings in settings for name in run_settings if name != "output_dir")
    rows = [(name, *(run_settings.get(name, "-") for run_settings in settings)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or their log.jsonl files.")],
    out: Annotated[
        Path | None, typer.Option(help="Output file, .png or .svg. (default: loss.png in the first run)")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Use tokens instead of steps on the x-axis.")] = False,
    panels: Annotated[
        str | None,
        typer.Option(
            help=f"Panels to plot, in order (comma-separated): {', '.join(PANELS | REWARD_PANELS)}. (default: all that "
            "the runs have)"
        ),
    ] = None,
) -> None:
    """Plot loss, learning rate, gradient norm, speed, and the rewards of preference pairs."""
    from whimbrel.base.errors import ConfigError, DataError, MissingExtraError
    from whimbrel.base.files import atomic_file
    from whimbrel.train.run_directory import log_path, read_log

    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise MissingExtraError("whimbrel plot", "matplotlib", "plot") from error

    labels = PANELS | REWARD_PANELS
    logs = {log_path(run): read_log(log_path(run)) for run in runs}
    has_rewards = any(ENTRIES["margin"] in line for lines in logs.values() for line in lines)
    default = list(labels if has_rewards else PANELS)
    names = default if panels is None else [name.strip() for name in panels.split(",")]
    if unknown := [name for name in names if name not in labels]:
        raise ConfigError(f"unknown panel '{unknown[0]}' in --panels (choose from: {', '.join(labels)})")
    target = out or (runs[0] if runs[0].is_dir() else runs[0].parent) / "loss.png"
    if target.suffix not in (".png", ".svg"):
        raise ConfigError(f"expected --out to end in .png or .svg, got {target}")
    columns = 1 if len(names) == 1 else 2
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(8, 4.5) if columns == 1 else (12, 3.5 * rows), layout="constrained")
    grid: list[Axes] = [figure.add_subplot(rows, columns, index) for index in range(1, len(names) + 1)]
    for log, lines in logs.items():
        if not any(line["kind"] == "step" for line in lines):
            raise DataError(f"{log} has no steps to plot")
        label = log.parent.name if log.name == "log.jsonl" else log.stem
        start = next(line["after"] - 1 for line in lines if line["kind"] == "step")
        if tokens and start:
            print(f"{log} starts after step {start}: its token counts start there")
        for axes, panel in zip(grid, names, strict=True):
            _plot_panel(axes, panel, lines, label, tokens=tokens)
    for axes, panel in zip(grid, names, strict=True):
        axes.set(xlabel="tokens" if tokens else "step", ylabel=labels[panel])
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
    grid[0].legend()
    with atomic_file(target) as file:
        figure.savefig(file, format=target.suffix[1:], dpi=130)
    print(f"wrote {target}")


def _plot_panel(axes: Axes, panel: str, lines: list[dict[str, Any]], name: str, *, tokens: bool) -> None:
    """Add the curve of one run to a panel. Values that are not finite (null in the log) become gaps."""
    from whimbrel.train.run_directory import tokens_after

    tokens_by_step = tokens_after(lines)

    def points(kind: str) -> tuple[list[int], list[float]]:
        records = [line for line in lines if line["kind"] == kind]
        xs = [tokens_by_step[line["after"]] if tokens else line["after"] for line in records]
        return xs, [_value(panel, line) for line in records]

    label = f"{name}, train" if panel == "loss" else name
    (train_line,) = axes.plot(*points("step"), linewidth=1.2, alpha=0.8, label=label)
    if panel in ("loss", *REWARD_PANELS) and any(line["kind"] == "validation" for line in lines):
        label = f"{name}, validation"
        axes.plot(*points("validation"), "o--", markersize=4, color=train_line.get_color(), label=label)


def _value(panel: str, line: dict[str, Any]) -> float:
    if panel == "speed":
        return line["tokens"] / line["seconds"] if line.get("seconds") else math.nan
    entry = ENTRIES.get(panel, panel)
    value = line.get(entry, line.get(f"eval_{entry}"))
    return math.nan if value is None else float(value)
