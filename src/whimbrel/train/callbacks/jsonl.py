"""Every number of a run, one JSON object a line."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

from whimbrel.base.logging import get_logger
from whimbrel.train.callbacks.writer import LogWriter
from whimbrel.train.log import log_line, truncate_log

__all__ = ["JsonLog"]

MAX_PENDING = 100_000
"""Lines kept in memory while the file cannot be written; beyond that the oldest are dropped."""

logger = get_logger(__name__)


class JsonLog(LogWriter):
    """Writes `log.jsonl` in the run directory. A resumed run first removes lines past its checkpoint.

    Part of every trainer, not one of its callbacks. If the file cannot be written (full disk), one warning is logged,
    lines are buffered until writing works again, and training continues.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: int | None = None
        self._size = 0
        self._torn = False
        self._after = 0
        self._pending: deque[bytes] = deque()
        self._dropped = 0
        self._failing = False

    def on_train_begin(self, **event: Any) -> None:
        """Continue the log after the current step."""
        self._held, self._path, self._failing, self._dropped = None, None, False, 0
        if event["state"].is_world_process_zero:
            self._path = Path(event["trainer"].config.output_dir) / "log.jsonl"
            self._restart_after(event["state"].global_step)

    def on_rewind(self, **event: Any) -> None:
        """Forget what was written past the step that the run went back to."""
        self.release()
        if self._path is not None:
            self._restart_after(event["step"])

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
        """Write pending lines and close the file."""
        del event
        self.release()
        self._flush()
        if self._pending:
            logger.warning("%s lacks the last %d lines: they could not be written", self._path, len(self._pending))
            self._pending.clear()
        self._close()
        self._path = None

    def _restart_after(self, step: int) -> None:
        """Drop lines past `step`, in the file and among the pending ones."""
        self._close()
        self._after = step
        self._pending.clear()
        self._flush()

    def _write(self, kind: str, after: int, fields: dict[str, Any]) -> None:
        self.release()
        if self._path is not None:
            self._pending.append(log_line(kind, after, fields).encode())
            if len(self._pending) > MAX_PENDING:
                self._pending.popleft()
                self._dropped += 1
            self._flush()

    def _flush(self) -> None:
        """Write pending lines one by one; lines that fail stay pending."""
        if self._path is None:
            return
        try:
            if self._file is None:
                self._open(self._path)
            while self._pending:
                self._append(self._pending[0])
                self._pending.popleft()
        except OSError as error:
            if not self._failing:
                self._failing = True
                logger.warning(
                    "cannot write %s: %s; training continues, and the log is written once the file is writable again",
                    self._path, error.strerror or error,
                )  # fmt: skip
        else:
            if self._failing:
                self._failing = False
                lost = f"; {self._dropped} lines were dropped" if self._dropped else ""
                logger.warning("%s is writable again%s", self._path, lost)
                self._dropped = 0

    def _open(self, path: Path) -> None:
        truncate_log(path, self._after)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._size, self._torn = os.fstat(self._file).st_size, False

    def _append(self, line: bytes) -> None:
        """Append a complete line; a partial line from a full disk is truncated before the next attempt."""
        assert self._file is not None
        if self._torn:
            os.ftruncate(self._file, self._size)
        written, self._torn = 0, True
        while written < len(line):
            written += os.write(self._file, line[written:])
        self._size, self._torn = self._size + written, False

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
