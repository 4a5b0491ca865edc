"""Curves for TensorBoard, in one folder over all sittings of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whimbrel.base.errors import MissingExtraError
from whimbrel.train.callbacks.writer import LogWriter, Warnings
from whimbrel.train.log import number

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardCallback"]

RETRY_SECONDS = 60.0
"""How long to wait after a failure before writing events again."""


class TensorBoardCallback(LogWriter):
    """Every step's loss, learning rate, gradient norm and speed; evaluations, samples and logs.

    A resumed run tells TensorBoard to discard events past its checkpoint. Events that cannot be written are dropped
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
        self._warnings = Warnings()
        self._retry_at = 0.0

    def on_train_begin(self, **event: Any) -> None:
        """Open the folder after the step that the run is at."""
        self._held = None
        if event["state"].is_world_process_zero:
            self._folder, self._retry_at = Path(event["args"].logging_dir), 0.0
            with self._guarded():
                self._open_after(event["state"].global_step)

    def on_rewind(self, **event: Any) -> None:
        """Forget what was written past the step that the run went back to."""
        self.release()
        if self._writer is not None:
            with self._guarded():
                self._open_after(event["step"])

    def on_train_metrics(self, **event: Any) -> None:
        """The numbers of a step."""
        metrics = dict(event["metrics"])
        step, seconds = metrics.pop("step"), metrics.pop("seconds")
        tokens = metrics.pop("tokens")
        if tokens and seconds:
            metrics["tokens_per_second"] = tokens / seconds
        self._write("train", metrics, step)

    def on_evaluate(self, **event: Any) -> None:
        """The numbers of an evaluation, without the `eval_` that their panel says already."""
        self.release(event["metrics"])
        metrics = {key.removeprefix("eval_"): value for key, value in event["metrics"].items()}
        self._write("eval", metrics, event["state"].global_step)

    def write_log(self, logs: dict[str, Any], step: int) -> None:
        """Whatever else is logged."""
        self._write("log", logs, step)

    def on_sample(self, **event: Any) -> None:
        """A text of the model."""
        with self._guarded():
            writer = self._ready(event["step"])
            if writer is not None:
                writer.add_text("sample", event["text"], event["step"])

    def on_save(self, **event: Any) -> None:
        """Have on disk what led to a checkpoint."""
        del event
        self.release()
        with self._guarded():
            if self._writer is not None:
                self._writer.flush()

    def on_train_end(self, **event: Any) -> None:
        """Let go of the file."""
        del event
        self.release()
        with self._guarded():
            self._close()
        self._folder = None

    def _open_after(self, step: int) -> None:
        self._close()
        assert self._folder is not None
        _outlast(self._folder)
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
        """Turn TensorBoard failures into warnings; the writer is unusable afterwards."""
        with self._warnings.instead_of(Exception, of=f"TensorBoard events in {self._folder}"):
            try:
                yield
            except Exception:
                self._retry_at = time.monotonic() + RETRY_SECONDS
                with contextlib.suppress(Exception):  # fails for the same reason, which is already being raised
                    self._close()
                raise

    def _write(self, panel: str, values: dict[str, Any], step: int) -> None:
        """The numbers among `values`: a curve has nothing else."""
        self.release()
        with self._guarded():
            writer = self._ready(step)
            for name, value in values.items():
                if writer is not None and (height := number(value)) is not None:
                    writer.add_scalar(f"{panel}/{name}", height, step)


def _outlast(folder: Path) -> None:
    """Wait, if need be, for the next second: TensorBoard reads files by name, and the names begin with the second."""
    seconds = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    time.sleep(min(1.0, max(0.0, max(seconds, default=0) + 1 - time.time())))
