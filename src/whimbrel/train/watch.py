"""Those who look on: what a run tells, and who writes it down. They never change the mathematics."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whimbrel.base.errors import DataError
from whimbrel.base.files import atomic_file

__all__ = ["JsonLog", "RunResult", "RunSummary", "StepRecord", "Watcher", "read_log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What is known before the first step."""

    device: str
    device_name: str
    parameters: int
    tokens_per_step: int
    micro_batch: int
    sequence_length: int
    accumulation: int
    total_steps: int
    first_step: int
    flops_per_token: int
    peak_flops: float | None
    compile_seconds: float
    resumed_from: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What is known of a finished step; `step` counts from 0."""

    step: int
    total: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. `seconds` is the time spent in steps, over all sittings, without compilation and validation."""

    step: int
    tokens: int
    seconds: float
    compile_seconds: float
    train_loss: float | None
    validation_loss: float | None
    peak_memory: int
    checkpoint: Path | None


class Watcher:
    """Sees what happens in a run. Override what you want to see."""

    def on_start(self, summary: RunSummary) -> None:
        """Before the first step."""

    def on_step(self, record: StepRecord) -> None:
        """A step has finished and its loss is known."""

    def on_validation(self, step: int, loss: float) -> None:
        """The held-out loss after `step` steps."""

    def on_sample(self, step: int, text: str) -> None:
        """A text written by the model after `step` steps."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """The state after `step` steps is on disk."""

    def on_end(self, result: RunResult) -> None:
        """After the last step of this sitting."""


FIELDS = {"step": ("after", "loss", "tokens"), "validation": ("after", "loss"), "sample": ("after", "text")}
"""What a line of the log must have, by its kind."""


class JsonLog(Watcher):
    """`log.jsonl`: one JSON object a line. A resumed run first drops what was logged past its checkpoint."""

    def __init__(self, path: Path, first_step: int) -> None:
        kept = [] if not path.exists() else [line for line in read_log(path) if line["after"] <= first_step]
        with atomic_file(path, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
        self._path = path

    def on_step(self, record: StepRecord) -> None:
        """A line for every step."""
        self._write("step", record.step + 1, dataclasses.asdict(record))

    def on_validation(self, step: int, loss: float) -> None:
        """A line for every validation."""
        self._write("validation", step, {"loss": loss})

    def on_sample(self, step: int, text: str) -> None:
        """A line for every sample."""
        self._write("sample", step, {"text": text})

    def _write(self, kind: str, after: int, fields: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "after": after, **fields}) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a `log.jsonl`; a last line cut short by a crash is left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not JSON: {error}") from error
        missing = _missing(record)
        if missing is not None:
            raise DataError(f"{path}:{number} is no line of a run's log: it has no '{missing}'")
        records.append(record)
    return records


def _missing(record: object) -> str | None:
    """What a line of the log lacks; None where it has all that its kind must have."""
    if not isinstance(record, dict) or record.get("kind") not in FIELDS:
        return "kind"
    return next((key for key in FIELDS[record["kind"]] if key not in record), None)
