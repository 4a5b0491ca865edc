"""Callbacks that write a run's metrics: log.jsonl, TensorBoard, Weights & Biases and trackio."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from whimbrel.base.errors import MissingExtraError
from whimbrel.config import to_table
from whimbrel.train.callback import TrainerCallback
from whimbrel.train.device import peak_memory
from whimbrel.train.run_directory import LOG_FILE, as_number, log_line, to_json, truncate_log

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["JsonlLogger", "LogWriter", "TensorBoardCallback", "TrackerCallback", "WriteWarnings"]

WARNING_INTERVAL = 600.0
"""Minimum seconds between two warnings about the same failing output."""
MAX_PENDING = 100_000
"""Maximum number of lines buffered while the file cannot be written; then the oldest are dropped."""
RETRY_SECONDS = 60.0
"""Seconds before TensorBoard events are retried after a failure."""
PROJECT = "whimbrel"

logger = logging.getLogger(__name__)


class WriteWarnings:
    """Turns write failures of an output into rate-limited warnings, so that training continues without its logs."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    @contextlib.contextmanager
    def suppress(self, *kinds: type[Exception], target: object) -> Iterator[None]:
        """Log errors of these kinds as warnings about `target` and skip the rest of the block."""
        try:
            yield
        except kinds as error:
            if time.monotonic() >= self._quiet_until:
                logger.warning("cannot write to %s: %s; training continues", target, " ".join(str(error).split()))
                self._quiet_until = time.monotonic() + WARNING_INTERVAL


class LogWriter(TrainerCallback, ABC):
    """Base class of callbacks that write metrics. Evaluations are logged too, but written by `on_evaluate`."""

    @abstractmethod
    def write_log(self, logs: dict[str, Any], step: int) -> None:
        """Write what was logged after `step` steps; not called for evaluations."""

    def on_log(self, **event: Any) -> None:
        if event.get("kind") != "evaluation":
            self.write_log(event["logs"], event["state"].global_step)


class JsonlLogger(LogWriter):
    """Writes `log.jsonl` in the run directory. A resumed run first removes lines past its checkpoint.

    Part of every trainer, not one of its callbacks. If the file cannot be written (full disk), one warning is logged,
    lines are buffered until writing works again, and training continues.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: int | None = None
        self._size = 0
        self._partial_line = False
        self._after = 0
        self._pending: deque[bytes] = deque()
        self._dropped = 0
        self._failing = False
        self._resumed = False

    def on_train_begin(self, **event: Any) -> None:
        """Open the log, dropping lines past the current step."""
        self._path, self._failing, self._dropped = None, False, 0
        self._resumed = event["state"].global_step > 0
        if event["state"].is_world_process_zero:
            self._path = Path(event["trainer"].config.output_dir) / LOG_FILE
            self._truncate_after(event["state"].global_step)

    def on_rollback(self, **event: Any) -> None:
        """Discard lines past the restored step."""
        if self._path is not None:
            self._truncate_after(event["step"])

    def on_train_metrics(self, **event: Any) -> None:
        """Write a step; flags that are false are left out. `resumed` marks the first step of a resumed session."""
        metrics = {key: value for key, value in event["metrics"].items() if value is not False}
        completed = metrics.pop("step")
        fields = {"total": event["state"].max_steps}
        for key in ("loss", "lr", "grad_norm", "seconds", "tokens"):
            fields[key] = metrics.pop(key)
        if self._path is not None:
            fields["peak_memory"] = peak_memory(event["trainer"].device)
        if self._resumed:
            fields["resumed"], self._resumed = True, False
        self._write("step", completed, fields | metrics)

    def on_evaluate(self, **event: Any) -> None:
        """Write an evaluation; its loss is called `loss`, as in a step."""
        metrics = dict(event["metrics"])
        self._write("validation", event["state"].global_step, {"loss": metrics.pop("eval_loss", None), **metrics})

    def on_sample(self, **event: Any) -> None:
        self._write("sample", event["step"], {"text": event["text"]})

    def write_log(self, logs: dict[str, Any], step: int) -> None:
        self._write("log", step, logs)

    def on_train_end(self, **event: Any) -> None:
        """Write pending lines and close the file."""
        del event
        self._flush()
        if self._pending:
            logger.warning("could not write the last %d lines of %s", len(self._pending), self._path)
            self._pending.clear()
        self._close()
        self._path = None

    def _truncate_after(self, step: int) -> None:
        """Drop lines past `step`, in the file and among the pending ones."""
        self._close()
        self._after = step
        self._pending.clear()
        self._flush()

    def _write(self, kind: str, after: int, fields: dict[str, Any]) -> None:
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
                dropped = f"; {self._dropped} lines were dropped" if self._dropped else ""
                logger.warning("%s is writable again%s", self._path, dropped)
                self._dropped = 0

    def _open(self, path: Path) -> None:
        truncate_log(path, self._after)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._size, self._partial_line = os.fstat(self._file).st_size, False

    def _append(self, line: bytes) -> None:
        """Append a complete line; a partial line from a full disk is truncated before the next attempt."""
        assert self._file is not None
        if self._partial_line:
            os.ftruncate(self._file, self._size)
        written, self._partial_line = 0, True
        while written < len(line):
            written += os.write(self._file, line[written:])
        self._size, self._partial_line = self._size + written, False

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class TensorBoardCallback(LogWriter):
    """Writes TensorBoard events: step metrics and throughput, evaluations, samples and logs.

    A resumed run makes TensorBoard discard events past its checkpoint. Events that cannot be written are dropped
    with a warning; a new file is opened a minute later.
    """

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("TensorBoard events", "tensorboard", "tensorboard") from error
        self._writer_class = SummaryWriter
        self._writer: SummaryWriter | None = None
        self._folder: Path | None = None
        self._warnings = WriteWarnings()
        self._retry_at = 0.0

    def on_train_begin(self, **event: Any) -> None:
        """Open the event file after the current step."""
        if event["state"].is_world_process_zero:
            self._folder, self._retry_at = Path(event["args"].logging_dir), 0.0
            with self._guarded():
                self._open_after(event["state"].global_step)

    def on_rollback(self, **event: Any) -> None:
        """Discard events past the restored step."""
        if self._writer is not None:
            with self._guarded():
                self._open_after(event["step"])

    def on_train_metrics(self, **event: Any) -> None:
        metrics = dict(event["metrics"])
        step, seconds = metrics.pop("step"), metrics.pop("seconds")
        tokens = metrics.pop("tokens")
        if tokens and seconds:
            metrics["tokens_per_second"] = tokens / seconds
        self._write("train", metrics, step)

    def on_evaluate(self, **event: Any) -> None:
        """Write the metrics of an evaluation in the panel `eval`."""
        metrics = {key.removeprefix("eval_"): value for key, value in event["metrics"].items()}
        self._write("eval", metrics, event["state"].global_step)

    def write_log(self, logs: dict[str, Any], step: int) -> None:
        self._write("log", logs, step)

    def on_sample(self, **event: Any) -> None:
        with self._guarded():
            writer = self._ready(event["step"])
            if writer is not None:
                writer.add_text("sample", event["text"], event["step"])

    def on_save(self, **event: Any) -> None:
        """Flush, so that the events up to a checkpoint are on disk."""
        del event
        with self._guarded():
            if self._writer is not None:
                self._writer.flush()

    def on_train_end(self, **event: Any) -> None:
        del event
        with self._guarded():
            self._close()
        self._folder = None

    def _open_after(self, step: int) -> None:
        self._close()
        assert self._folder is not None
        _wait_for_next_second(self._folder)
        self._writer = self._writer_class(str(self._folder), purge_step=step + 1)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _ready(self, step: int) -> SummaryWriter | None:
        """The writer, reopened at `step` some time after a failure."""
        if self._writer is None and self._folder is not None and time.monotonic() >= self._retry_at:
            self._open_after(step - 1)
        return self._writer

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Log TensorBoard failures as warnings, close the writer and reopen it later."""
        with self._warnings.suppress(Exception, target=f"TensorBoard events in {self._folder}"):
            try:
                yield
            except Exception:
                self._retry_at = time.monotonic() + RETRY_SECONDS
                with contextlib.suppress(Exception):  # fails for the same reason, which is already being raised
                    self._close()
                raise

    def _write(self, panel: str, values: dict[str, Any], step: int) -> None:
        """Write the values that are numbers."""
        with self._guarded():
            writer = self._ready(step)
            for name, value in values.items():
                if writer is not None and (scalar := as_number(value)) is not None:
                    writer.add_scalar(f"{panel}/{name}", scalar, step)


def _wait_for_next_second(folder: Path) -> None:
    """TensorBoard reads event files in the order of their names, which start with the second of their creation."""
    seconds = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    time.sleep(min(1.0, max(0.0, max(seconds, default=0) + 1 - time.time())))


class TrackerCallback(LogWriter):
    """Reports step metrics, evaluations and logs under `run_name`, or the name of the run directory.

    A resumed run continues the same tracker run, whose id is saved in checkpoints. Without an account nothing is
    uploaded: Weights & Biases then writes to the run directory, and trackio always writes local files.
    """

    def __init__(self, kind: Literal["trackio", "wandb"], project: str | None = None) -> None:
        try:
            self._module: Any = importlib.import_module(kind)
        except ImportError as error:
            raise MissingExtraError(f"logging to {kind}", kind, kind) from error
        self.name = f"TrackerCallback-{kind}"
        self._kind = kind
        self._project = project or os.environ.get(f"{kind.upper()}_PROJECT", PROJECT)
        self._id = uuid.uuid4().hex[:12]
        self._run: Any = None
        self._warnings = WriteWarnings()

    def on_train_begin(self, **event: Any) -> None:
        """Open the tracker run, or reopen it."""
        if event["state"].is_world_process_zero:
            config = event["trainer"].config
            self._run = self._open(Path(config.output_dir), config.log.run_name, to_table(config))

    def on_train_metrics(self, **event: Any) -> None:
        metrics = dict(event["metrics"])
        step = metrics.pop("step")
        self._log({f"train/{name}": value for name, value in metrics.items() if value is not False}, step)

    def on_evaluate(self, **event: Any) -> None:
        metrics = {f"eval/{name.removeprefix('eval_')}": value for name, value in event["metrics"].items()}
        self._log(metrics, event["state"].global_step)

    def write_log(self, logs: dict[str, Any], step: int) -> None:
        self._log({f"log/{name}": value for name, value in logs.items()}, step)

    def on_train_end(self, **event: Any) -> None:
        del event
        run, self._run = self._run, None
        if run is not None:
            with self._warnings.suppress(Exception, target=self._kind):
                run.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._id = state["id"]

    def _open(self, output_dir: Path, name: str | None, settings: dict[str, Any]) -> Any:
        name = name or output_dir.name
        if self._kind == "trackio":
            unique = f"{name}-{self._id}"
            return self._module.init(project=self._project, name=unique, config=settings, resume="allow", embed=False)
        signed_in = self._module.api.api_key is not None
        run = self._module.init(
            project=self._project, name=name, id=self._id, resume="allow", config=settings,
            dir=str(output_dir), mode=os.environ.get("WANDB_MODE") or ("online" if signed_in else "offline"),
        )  # fmt: skip
        run.define_metric("*", step_metric="step")  # wandb's own step cannot decrease, as it does after a resume
        return run

    def _log(self, values: dict[str, Any], step: int) -> None:
        values = {
            name: to_json(value) if as_number(value) is None else as_number(value) for name, value in values.items()
        }
        with self._warnings.suppress(Exception, target=self._kind):
            if self._run is not None and self._kind == "trackio":
                self._run.log(values, step=step)
            elif self._run is not None:
                self._run.log({**values, "step": step})
