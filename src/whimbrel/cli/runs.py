"""`whimbrel runs`, `control` and `compare`: list, control and compare training runs, without torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whimbrel.cli.plot import ENTRIES, REWARD_PANELS

if TYPE_CHECKING:
    from whimbrel.train.run_log import RunLog

__all__ = ["compare", "control", "runs"]


def runs(
    directories: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or directories that contain runs. (default: runs)")
    ] = None,
) -> None:
    """List runs and their state: running, finished, stopped or dead (killed).

    To resume a stopped or dead run, rerun its command. The state is "other host" for a run on another machine, and
    "other user" for an unfinished run of another user.
    """
    from whimbrel.cli.terminal import print_table
    from whimbrel.train.run_log import find_runs

    roots = directories or [Path("runs")]
    run_directories = find_runs(roots)
    if not run_directories:
        print(f"no runs in {', '.join(map(str, roots))}")
        return
    columns = ("run", "state", "step", "loss", "validation", "checkpoint", "age")
    print_table(columns, [_row(run) for run in run_directories], optional=("checkpoint", "age"))


def _row(run: Path) -> tuple[str, ...]:
    from whimbrel.checkpoint import latest_checkpoint
    from whimbrel.train.run_log import inspect_run

    info, checkpoint = inspect_run(run), latest_checkpoint(run)
    return (
        str(run),
        info.state,
        f"{info.step}/{'?' if info.total is None else info.total}",
        *("-" if line.get("loss") is None else f"{line['loss']:.4f}" for line in (info.last, info.validation)),
        "-" if checkpoint is None else checkpoint.name,
        _format_age(time.time() - info.modified),
    )


def _format_age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _complete_action(incomplete: str) -> list[str]:
    from whimbrel.train.control import ACTIONS

    return [action for action in ACTIONS if action.startswith(incomplete)]


def control(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    action: Annotated[
        str, typer.Argument(help="status, save, stop, save-stop or abort.", autocompletion=_complete_action)
    ],
) -> None:
    """Show the status of a running training job, or make it save, stop or abort.

    The action takes effect after the current step. stop ends the run as if this were its last step, with the
    configured evaluation and checkpoint; save-stop saves a checkpoint and ends the run without an evaluation; abort
    ends the run without either.
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
    """Compare runs: which settings differ, the losses and speed of each, and whether the losses are bit-identical."""
    from whimbrel.base.errors import ConfigError, DataError
    from whimbrel.cli.terminal import print_table
    from whimbrel.train.run_log import RunLog

    if len(runs) < 2:
        raise ConfigError(f"expected two or more runs, got only {runs[0]}")
    logs = [RunLog(run) for run in runs]
    if empty := next((log for log in logs if not log.steps), None):
        raise DataError(f"{empty.path} has no steps to compare")
    names = [str(run) for run in runs]
    if different := _different_settings([_settings(run) for run in runs]):
        print_table(("setting", *names), different)
        print()
    print_table(("", *names), _metric_rows(logs))


def _metric_rows(logs: list[RunLog]) -> list[tuple[str, ...]]:
    """One row per metric."""
    totals = [log.tokens[log.steps[-1]["after"]] for log in logs]
    seconds = [log.seconds[log.steps[-1]["after"]] for log in logs]
    since = [f" since step {log.start:,}" * (log.start > 0) for log in logs]
    rows = [
        ("steps", *(f"{log.steps[-1]['after']:,}" for log in logs)),
        ("tokens", *(f"{total:,}{start}" for total, start in zip(totals, since, strict=True))),
        ("train loss, last", *(_last(log.steps) for log in logs)),
        ("train loss, best", *(_best(log.steps) for log in logs)),
        ("validation loss, last", *(_last(log.validations) for log in logs)),
        ("validation loss, best", *(_best(log.validations) for log in logs)),
        (
            "tokens/s",
            *(f"{total / spent:,.0f}" if spent else "-" for total, spent in zip(totals, seconds, strict=True)),
        ),
        ("training time", *(f"{spent:.1f} s" for spent in seconds)),
    ]
    rows += [row for row in _finetuning_rows(logs, seconds) if set(row[1:]) != {"-"}]
    shortest = min(totals)
    comparable = all(log.start == logs[0].start for log in logs)  # otherwise token counts start differently
    if comparable and any(total != shortest for total in totals):
        for name, kind in (("train", "steps"), ("validation", "validations")):
            short = [[line for line in getattr(log, kind) if log.tokens[line["after"]] <= shortest] for log in logs]
            rows.append((f"{name} loss at {shortest:,} tokens", *map(_last, short)))
    compared = (_compare_losses(logs[0], log) for log in logs[1:])
    return [*rows, ("losses compared with the first run", "-", *compared)]


def _finetuning_rows(logs: list[RunLog], seconds: list[float]) -> list[tuple[str, ...]]:
    """Supervised tokens and rewards, where there are any."""
    supervised = [sum(line.get("supervised_tokens", 0) for line in log.steps) for log in logs]
    speeds = (f"{n / spent:,.0f}" if n and spent else "-" for n, spent in zip(supervised, seconds, strict=True))
    rows = [("supervised tokens/s", *speeds)]
    for panel, name in REWARD_PANELS.items():
        rows.append((f"train {name}, last", *(_metric(log.steps, ENTRIES[panel]) for log in logs)))
        validated = (_metric(log.validations, f"eval_{ENTRIES[panel]}") for log in logs)
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


def _compare_losses(first: RunLog, other: RunLog) -> str:
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
