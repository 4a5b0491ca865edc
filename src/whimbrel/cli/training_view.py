"""What a person sees of a run: plain lines, or a live line on a terminal."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from whimbrel.train import RunResult, RunSummary, StepRecord, Watcher
from whimbrel.train.device import peak_memory

__all__ = ["LiveView", "PlainView"]


class PlainView(Watcher):
    """One line per event, the same on every machine; made to be read by people and by grep."""

    def on_start(self, summary: RunSummary) -> None:
        """The head of the log."""
        self._say(f"Using device: {summary.device}")
        self._say(f"Total batch size: {summary.tokens_per_step}")
        self._say(f"Tokens per micro-batch: {summary.micro_batch * summary.sequence_length}")
        self._say(f"Gradient accumulation steps: {summary.accumulation}")
        if summary.resumed_from is not None:
            self._say(f"Resumed from: {summary.resumed_from} (step {summary.first_step})")
        if summary.first_step >= summary.total_steps:
            self._say(
                f"Already at step {summary.first_step} of {summary.total_steps}: nothing to do; raise train.steps"
            )

    def on_step(self, record: StepRecord) -> None:
        """One line per step."""
        rate = record.tokens / record.seconds
        self._say(
            f"step:{record.step}/{record.total} train_loss:{record.loss:.4f} "
            f"train_time:{record.seconds * 1000:.0f}ms token/s:{rate:.2f}"
        )

    def on_validation(self, step: int, loss: float) -> None:
        """The held-out loss."""
        self._say(f"validation after step {step}: loss {loss:.4f}")

    def on_sample(self, step: int, text: str) -> None:
        """A text of the model."""
        self._say(f"sample after step {step}:\n{text}\n")

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Where the state is."""
        self._say(f"checkpoint after step {step}: {path}")

    def on_end(self, result: RunResult) -> None:
        """The sums."""
        self._say(f"Total time: {result.seconds:.2f}s ({result.seconds / 60:.2f} minutes)")
        self._say(f"Total tokens processed: {result.tokens:,}")
        if result.seconds:
            self._say(f"Average tokens/sec: {result.tokens / result.seconds:.2f}")
        self._say(f"Compile time: {result.compile_seconds:.2f}s (not in the total)")
        self._say(f"Peak memory: {result.peak_memory / 2**30:.2f} GiB")

    def close(self) -> None:
        """Leave the screen as it was found."""

    def _say(self, text: str) -> None:
        print(text, flush=True)


class LiveView(PlainView):
    """A progress line that stays in place; everything but the steps scrolls above it."""

    def __init__(self, console: Console) -> None:
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console)
        self._summary: RunSummary | None = None
        self._device: torch.device | None = None

    def on_start(self, summary: RunSummary) -> None:
        """The head of the log, what the numbers mean, and the line."""
        super().on_start(summary)
        self._summary, self._device = summary, torch.device(summary.device)
        self._say(f"Model: {summary.parameters:,} parameters on {summary.device_name}")
        if summary.peak_flops is not None:
            self._say(
                f"MFU: {summary.flops_per_token:,} operations a token (6 per parameter + attention, causality not "
                f"discounted) over {summary.peak_flops / 1e12:,.0f} TFLOP/s (dense bf16)"
            )
        self._progress.add_task("starting", total=summary.total_steps, completed=summary.first_step)
        self._progress.start()

    def on_step(self, record: StepRecord) -> None:
        """Move the line."""
        rate = record.tokens / record.seconds
        fields = [f"step {record.step + 1}/{record.total}", f"loss {record.loss:.4f}", f"lr {record.lr:.2e}"]
        fields += [f"norm {record.grad_norm:.2f}", f"{rate:,.0f} tok/s"]
        if self._summary is not None and self._summary.peak_flops is not None:
            fields.append(f"MFU {rate * self._summary.flops_per_token / self._summary.peak_flops:.1%}")
        if self._device is not None:
            fields.append(f"{peak_memory(self._device) / 2**30:.1f} GiB")
        self._progress.update(self._progress.task_ids[0], completed=record.step + 1, description="  ".join(fields))

    def on_end(self, result: RunResult) -> None:
        """Take the line away and print the sums."""
        self.close()
        super().on_end(result)

    def close(self) -> None:
        """Take the line away; also when the run ends in an error."""
        self._progress.stop()

    def _say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)
