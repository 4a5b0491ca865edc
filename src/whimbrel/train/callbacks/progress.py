"""What a person sees of a run: plain lines, or a live line on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from whimbrel.base.progress import format_bytes
from whimbrel.optim import ParameterRow
from whimbrel.train.callback import StopRequest, TrainerCallback
from whimbrel.train.callbacks.loggers import Warnings
from whimbrel.train.device import peak_memory
from whimbrel.train.log import number
from whimbrel.train.signals import SIGNALS
from whimbrel.train.summary import MemoryEstimate, RunSummary

__all__ = ["ProgressCallback"]

NAMED = 4
"""Names of parameters in a line, at most."""
REDRAW = 0.1
"""Seconds between two changes of the live line: steps may be much shorter than anyone can read."""


class ProgressCallback(TrainerCallback):
    """Tells of a run on a console. Off a terminal, or if `plain`: one line per event, made for people and for grep.

    On a terminal the steps share one line that stays in place, and everything else scrolls above it.
    """

    def __init__(self, console: Console | None = None, *, plain: bool = False) -> None:
        self._console = console or Console()
        self._plain = plain or not self._console.is_terminal
        self._shown = True
        self._summary: RunSummary | None = None
        self._live: Progress | None = None
        self._drawn = 0.0
        self._warnings = Warnings()

    def on_init_end(self, **event: Any) -> None:
        """One process speaks for all."""
        self._shown = event["state"].is_world_process_zero

    def on_train_begin(self, **event: Any) -> None:
        """The head: what runs, how large it is, what it needs, what is on, and where it goes on."""
        summary = self._summary = event["summary"]
        for line in _head(summary):
            self._say(line)
        if self._shown and not self._plain and summary.first_step < summary.total_steps:
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn())
            self._live = Progress(*columns, console=self._console)
            self._live.add_task("starting", total=summary.total_steps, completed=summary.first_step)
            with self._guarded():
                self._live.start()

    def on_train_metrics(self, **event: Any) -> None:
        """A line for every step, or a move of the live one."""
        metrics, summary = event["metrics"], self._summary
        if summary is None:
            return
        if self._live is None:
            self._say(_step_line(metrics, summary.total_steps))
        elif metrics["step"] == summary.total_steps or time.monotonic() - self._drawn > REDRAW:
            self._drawn = time.monotonic()
            text = f"{_live_text(metrics, summary)}  {_gib(peak_memory(event['trainer'].device), 1)}"
            with self._guarded():
                self._live.update(self._live.task_ids[0], completed=metrics["step"], description=text)

    def on_evaluate(self, **event: Any) -> None:
        """The loss on held-out data, and what else was measured."""
        measured = [f"{key.removeprefix('eval_')} {_measure(value)}" for key, value in event["metrics"].items()]
        self._say(f"validation after step {event['state'].global_step}: {'  '.join(measured)}")

    def on_sample(self, **event: Any) -> None:
        """A text of the model."""
        self._say(f"sample after step {event['step']}:\n{event['text']}\n")

    def on_save(self, **event: Any) -> None:
        """Where the state is."""
        self._say(f"checkpoint after step {event['step']}: {event['checkpoint']}")

    def on_rewind(self, **event: Any) -> None:
        """The run went back."""
        self._say(f"went back to step {event['step']}")

    def on_train_end(self, **event: Any) -> None:
        """Take the line away, give the sums, and say who asked for the end; where a run failed, its error speaks."""
        if self._live is not None:
            with self._guarded():
                self._live.stop()
            self._live = None
        output, stop = event["output"], event["stopped_by"]
        if self._summary is None or output is None:
            return
        for line in _sums(output.metrics):
            self._say(line)
        if stop is not None and output.global_step < self._summary.total_steps:
            asker = event["trainer"].callbacks.named().get(stop.callback)
            reason, overwrites = getattr(asker, "reason", None), event["trainer"].config.overwrite_output_dir
            for line in _ending(stop, reason, output.global_step, event["checkpoint"], overwrites=overwrites):
                self._say(line)

    def _say(self, text: str) -> None:
        """Above the live line, where there is one; otherwise as it is: rich would wrap it."""
        with self._guarded():
            if self._live is not None:
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            elif self._shown:
                self._console.file.write(text + "\n")
                self._console.file.flush()

    def _guarded(self) -> AbstractContextManager[None]:
        """Log a warning instead of failing when the console cannot be written (`| head`, full disk)."""
        return self._warnings.instead_of(OSError, ValueError, of=getattr(self._console.file, "name", "the console"))


def _head(summary: RunSummary) -> Iterator[str]:
    """What is known before the first step."""
    yield f"Using device: {summary.device}"
    if summary.tokens_per_step is None:
        yield f"Total batch size: {summary.samples_per_step} samples"
    else:
        yield f"Total batch size: {summary.tokens_per_step}"
        yield f"Tokens per micro-batch: {summary.tokens_per_micro_batch}"
    yield f"Gradient accumulation steps: {summary.accumulation}"
    rest = f", {summary.frozen_parameters:,} of them frozen" if summary.frozen_parameters else ""
    yield f"Model: {summary.parameters:,} parameters on {summary.device_name}{rest}"
    length = f"Steps: {summary.total_steps:,}"
    if summary.tokens_per_step is not None:
        length += f" ({summary.total_steps * summary.tokens_per_step:,} tokens)"
    yield length
    yield f"Memory: {_memory(summary.memory)}; activations come on top"
    yield from _moved(summary.optimizer_table)
    if summary.peak_flops is not None and summary.flops_per_token is not None:
        yield (
            f"MFU: {summary.flops_per_token:,.0f} operations a token (6 per parameter + attention, causality not "
            f"discounted) over {summary.peak_flops / 1e12:,.0f} TFLOP/s (dense bf16)"
        )
    if summary.features:
        yield f"With: {', '.join(summary.features)}"
    if summary.resumed_from is not None:
        yield f"Resumed from: {summary.resumed_from} (step {summary.first_step})"
    if summary.first_step >= summary.total_steps:
        yield f"Already at step {summary.first_step} of {summary.total_steps}: nothing to do; raise train.steps"


def _memory(memory: MemoryEstimate) -> str:
    parts = [(memory.weights, "weights"), (memory.gradients, "gradients"), (memory.optimizer, "optimizer state")]
    known = [f"{format_bytes(size)} {what}" for size, what in parts if size is not None]
    return " + ".join(known) + ("" if memory.optimizer is not None else " + optimizer state, not known yet")


def _moved(rows: Iterable[ParameterRow]) -> Iterator[str]:
    """What moves the parameters, a line for each way there is; `whimbrel memory` has one for each parameter."""
    alike: dict[tuple[str, float, float], list[ParameterRow]] = {}
    for row in rows:
        alike.setdefault((row.rule, row.lr, row.weight_decay), []).append(row)
    for (rule, lr, decay), found in alike.items():
        known = [row.state for row in found if row.state is not None]
        state = f", {format_bytes(sum(known))} of state" if len(known) == len(found) else ""
        names = ", ".join(row.name for row in found[:NAMED]) + (", ..." if len(found) > NAMED else "")
        count = sum(row.count for row in found)
        yield f"Moved by {rule} (lr {lr:g}, weight decay {decay:g}): {count} tensor{'s' * (count > 1)}{state}: {names}"


def _step_line(metrics: dict[str, Any], total: int) -> str:
    """A step, as it is counted from 0."""
    seconds, tokens = metrics["seconds"], metrics["tokens"]
    rate = f" token/s:{tokens / seconds:.2f}" if tokens and seconds else ""
    skipped = " skipped" if metrics.get("skipped") else ""
    loss = f"train_loss:{metrics['loss']:.4f}"
    return f"step:{metrics['step'] - 1}/{total} {loss} train_time:{seconds * 1000:.0f}ms{rate}{skipped}"


def _live_text(metrics: dict[str, Any], summary: RunSummary) -> str:
    """What stands beside the bar."""
    fields = [f"step {metrics['step']}/{summary.total_steps}", f"loss {metrics['loss']:.4f}"]
    fields += [f"lr {metrics['lr']:.2e}", f"norm {metrics['grad_norm']:.2f}"]
    if metrics["tokens"] and metrics["seconds"]:
        rate = metrics["tokens"] / metrics["seconds"]
        fields.append(f"{rate:,.0f} tok/s")
        if summary.peak_flops is not None and summary.flops_per_token is not None:
            fields.append(f"MFU {rate * summary.flops_per_token / summary.peak_flops:.1%}")
    return "  ".join(fields)


def _measure(value: Any) -> str:
    """What an evaluation measured, which need not be a number."""
    height = number(value)
    return str(value) if height is None else f"{height:.4f}"


def _sums(metrics: dict[str, Any]) -> Iterator[str]:
    """What a run took, over all its sittings; compiling and evaluating are not in the time."""
    seconds, tokens = metrics["train_seconds"], metrics["num_input_tokens_seen"]
    yield f"Total time: {seconds:.2f}s ({seconds / 60:.2f} minutes)"
    if tokens:
        yield f"Total tokens processed: {tokens:,}"
        if seconds:
            yield f"Average tokens/sec: {tokens / seconds:.2f}"
    yield f"Compile time: {metrics['compile_seconds']:.2f}s (not in the total)"
    yield f"Peak memory: {_gib(metrics['peak_memory'])}"


def _ending(
    stop: StopRequest, reason: str | None, step: int, checkpoint: Path | None, *, overwrites: bool
) -> Iterator[str]:
    """Who asked for the end, and what is there of the run."""
    if stop.callback in {number.name for number in SIGNALS}:
        yield f"Interrupted by {stop.callback}"
    else:
        yield f"{stop.callback} asked to {stop.kind} ({stop.event})" + (f": {reason}" if reason else "")
    if stop.kind == "abort":
        saved = f"the newest checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint"
        yield f"Aborted at step {step}, nothing saved: {saved}"
    else:
        saved = f"saved in {checkpoint}" if checkpoint else "nothing to save yet"
        again = "leave out overwrite_output_dir to go on" if overwrites else "run the same command to go on"
        yield f"Stopped at step {step}, {saved}: {again}"


def _gib(size: int, digits: int = 2) -> str:
    return f"{size / 2**30:.{digits}f} GiB"
