"""Every number of a run, one JSON object a line."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from whimbrel.train.callbacks.writer import LogWriter
from whimbrel.train.log import log_line, truncate_log

__all__ = ["JsonLogCallback"]


class JsonLogCallback(LogWriter):
    """Writes `log.jsonl` in the run directory. A run that goes on first drops what lies past its checkpoint."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: IO[str] | None = None

    def on_train_begin(self, **event: Any) -> None:
        """Go on after the step that the run is at."""
        self._held = None
        if event["state"].is_world_process_zero:
            self._path = Path(event["trainer"].config.output_dir) / "log.jsonl"
            self._open_after(event["state"].global_step)

    def on_rewind(self, **event: Any) -> None:
        """Forget what was written past the step that the run went back to."""
        self.release()
        if self._file is not None:
            self._open_after(event["step"])

    def on_train_metrics(self, **event: Any) -> None:
        """A line for every step; that it was not skipped goes without saying."""
        metrics = {key: value for key, value in event["metrics"].items() if value is not False}
        done = metrics.pop("step")
        named = {"step": done - 1, "total": event["state"].max_steps}
        for key in ("loss", "lr", "grad_norm", "seconds", "tokens"):
            named[key] = metrics.pop(key)
        self._write("step", done, named | metrics)

    def on_evaluate(self, **event: Any) -> None:
        """A line for every evaluation; its loss has the same name as that of a step."""
        metrics = dict(event["metrics"])
        self.release(metrics)
        self._write("validation", event["state"].global_step, {"loss": metrics.pop("eval_loss", None), **metrics})

    def on_sample(self, **event: Any) -> None:
        """A line for every text."""
        self._write("sample", event["step"], {"text": event["text"]})

    def write_log(self, logs: dict[str, Any], step: int) -> None:
        """A line for whatever else is logged."""
        self._write("log", step, logs)

    def on_train_end(self, **event: Any) -> None:
        """Let go of the file."""
        del event
        self.release()
        self._close()

    def _open_after(self, step: int) -> None:
        self._close()
        if self._path is not None:
            truncate_log(self._path, step)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, after: int, fields: dict[str, Any]) -> None:
        self.release()
        if self._file is not None:
            self._file.write(log_line(kind, after, fields))
