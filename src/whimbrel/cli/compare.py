"""`whimbrel compare RUN RUN...`: compare the settings and losses of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["compare"]


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
        print_table(("settings that differ", *names), different)
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
        from whimbrel.train.log import log_path, read_log, tokens_after

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
        ("time in steps", *(f"{curve.seconds:.1f} s" for curve in curves)),
    ]
    shortest = min(curve.total for curve in curves)
    comparable = all(curve.start == curves[0].start for curve in curves)  # otherwise token counts start differently
    if comparable and any(curve.total != shortest for curve in curves):
        short = [curve.up_to(shortest) for curve in curves]
        rows.append((f"train loss by {shortest:,} tokens", *(_last(curve.steps) for curve in short)))
        rows.append((f"validation loss by {shortest:,} tokens", *(_last(curve.validations) for curve in short)))
    return [*rows, ("losses compared with the first run", "-", *(_exactness(curves[0], curve) for curve in curves[1:]))]


def _last(lines: list[dict[str, Any]]) -> str:
    return _loss(lines[-1]) if lines else "-"


def _best(lines: list[dict[str, Any]]) -> str:
    """The lowest finite loss and its step; a loss that is not finite is null in the log."""
    best = min((line for line in lines if line["loss"] is not None), key=lambda line: line["loss"], default=None)
    return "-" if best is None else f"{_loss(best)} after {best['after']:,}"


def _loss(line: dict[str, Any]) -> str:
    return "not finite" if line["loss"] is None else f"{line['loss']:.4f}"


def _exactness(first: Curve, other: Curve) -> str:
    """The first step whose losses differ in any bit, counted from 0 as in the log."""
    ours = {line["after"]: line["loss"] for line in first.steps}
    theirs = {line["after"]: line["loss"] for line in other.steps}
    shared = sorted(ours.keys() & theirs.keys())
    different = next((after for after in shared if ours[after] != theirs[after]), None)
    if different is not None:
        return f"differ from step {different - 1} on"
    if not shared:
        return "no step in common"
    return f"identical in all {len(shared):,} steps" if len(shared) > 1 else "identical in the only common step"


def _settings(run: Path) -> dict[str, str]:
    """The settings of a run by dotted name; empty if it has no config.toml."""
    from whimbrel.config import load_toml

    path = (run if run.is_dir() else run.parent) / "config.toml"
    return _flat(load_toml(path)) if path.is_file() else {}


def _flat(table: dict[str, Any], section: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in table.items():
        found |= _flat(value, f"{section}{name}.") if isinstance(value, dict) else {f"{section}{name}": str(value)}
    return found


def _different_settings(settings: list[dict[str, str]]) -> list[tuple[str, ...]]:
    """One row per setting that differs between runs, except for the output directory."""
    names = dict.fromkeys(name for own in settings for name in own if name != "output_dir")
    rows = [(name, *(own.get(name, "-") for own in settings)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]
