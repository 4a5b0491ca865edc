"""`whimbrel compare RUN RUN...`: runs side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["compare"]


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run directories, or their log.jsonl files.")],
) -> None:
    """Show which settings differ, how far each run came, and whether their losses are the same to the bit."""
    from whimbrel.base.errors import ConfigError
    from whimbrel.cli.terminal import print_table

    if len(runs) < 2:
        raise ConfigError(f"compare needs two runs or more: only {runs[0]} was given")
    curves = [Curve.read(run) for run in runs]
    names = [str(run) for run in runs]
    if differing := _differing([_settings(run) for run in runs]):
        print_table(("settings that differ", *names), differing)
        print()
    print_table(("", *names), _measures(curves))


@dataclass(frozen=True, slots=True)
class Curve:
    """The steps and the validations of a run, and how many tokens each came after."""

    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    tokens: dict[int, int]
    """Counted from where the log begins: that of a run which went on in a directory of its own begins late."""

    @classmethod
    def read(cls, run: Path) -> Curve:
        """From its log."""
        from whimbrel.base.errors import DataError
        from whimbrel.train.log import log_of, read_log, tokens_after

        lines = read_log(log_of(run))
        steps = [line for line in lines if line["kind"] == "step"]
        if not steps:
            raise DataError(f"{log_of(run)} holds no steps: nothing to compare")
        return cls(steps, [line for line in lines if line["kind"] == "validation"], tokens_after(lines))

    @property
    def begin(self) -> int:
        """Steps that were done before the first in the log."""
        return int(self.steps[0]["after"]) - 1

    @property
    def total(self) -> int:
        """Tokens of all steps."""
        return self.tokens[self.steps[-1]["after"]]

    @property
    def seconds(self) -> float:
        """Time in steps."""
        return sum(float(line.get("seconds", 0.0)) for line in self.steps)

    def by(self, tokens: int) -> Curve:
        """What there was of it by then."""

        def within(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [line for line in lines if self.tokens[line["after"]] <= tokens]

        return Curve(within(self.steps), within(self.validations), self.tokens)


def _measures(curves: list[Curve]) -> list[tuple[str, ...]]:
    """One row for each thing that can be said of every run."""
    rows = [
        ("steps", *(f"{curve.steps[-1]['after']:,}" for curve in curves)),
        ("tokens", *(f"{curve.total:,}{f' since step {curve.begin:,}' * (curve.begin > 0)}" for curve in curves)),
        ("train loss, last", *(_last(curve.steps) for curve in curves)),
        ("train loss, best", *(_best(curve.steps) for curve in curves)),
        ("validation loss, last", *(_last(curve.validations) for curve in curves)),
        ("validation loss, best", *(_best(curve.validations) for curve in curves)),
        ("tokens/s", *(f"{curve.total / curve.seconds:,.0f}" if curve.seconds else "-" for curve in curves)),
        ("time in steps", *(f"{curve.seconds:.1f} s" for curve in curves)),
    ]
    shortest = min(curve.total for curve in curves)
    together = all(curve.begin == curves[0].begin for curve in curves)  # else tokens are not counted alike
    if together and any(curve.total != shortest for curve in curves):
        short = [curve.by(shortest) for curve in curves]
        rows.append((f"train loss by {shortest:,} tokens", *(_last(curve.steps) for curve in short)))
        rows.append((f"validation loss by {shortest:,} tokens", *(_last(curve.validations) for curve in short)))
    return [*rows, ("losses beside the first run's", "-", *(_exactness(curves[0], curve) for curve in curves[1:]))]


def _last(lines: list[dict[str, Any]]) -> str:
    return _loss(lines[-1]) if lines else "-"


def _best(lines: list[dict[str, Any]]) -> str:
    """The smallest loss, and after how many steps it was; one that is not finite (null) is none."""
    best = min((line for line in lines if line["loss"] is not None), key=lambda line: line["loss"], default=None)
    return "-" if best is None else f"{_loss(best)} after {best['after']:,}"


def _loss(line: dict[str, Any]) -> str:
    return "not finite" if line["loss"] is None else f"{line['loss']:.4f}"


def _exactness(first: Curve, other: Curve) -> str:
    """From which step on the losses differ, compared as bits; steps are counted from 0, as they are printed."""
    ours = {line["after"]: line["loss"] for line in first.steps}
    theirs = {line["after"]: line["loss"] for line in other.steps}
    shared = sorted(ours.keys() & theirs.keys())
    odd = next((after for after in shared if ours[after] != theirs[after]), None)
    if odd is not None:
        return f"differ from step {odd - 1} on"
    return f"the same in all {len(shared):,} steps" if shared else "no step in common"


def _settings(run: Path) -> dict[str, str]:
    """The settings of a run by their dotted names; none where it has no config.toml."""
    from whimbrel.config import load_toml

    path = (run if run.is_dir() else run.parent) / "config.toml"
    return _flat(load_toml(path)) if path.is_file() else {}


def _flat(table: dict[str, Any], section: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in table.items():
        found |= _flat(value, f"{section}{name}.") if isinstance(value, dict) else {f"{section}{name}": str(value)}
    return found


def _differing(settings: list[dict[str, str]]) -> list[tuple[str, ...]]:
    """One row for each setting that not all have alike; where a run stands is no setting."""
    names = dict.fromkeys(name for own in settings for name in own if name != "output_dir")
    rows = [(name, *(own.get(name, "-") for own in settings)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]
