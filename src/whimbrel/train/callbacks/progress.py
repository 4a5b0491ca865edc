"""Prints a run: a summary before the first step, then a progress bar on a terminal, otherwise one line per step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.control import Control
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.optim import Optimizer

from whimbrel.base.files import format_bytes
from whimbrel.optim import ParameterRow, ProjectInBackward, StepInBackward, state_bytes
from whimbrel.train.callback import StopRequest, TrainerCallback
from whimbrel.train.callbacks.loggers import WriteWarnings
from whimbrel.train.config import TrainerConfig
from whimbrel.train.control import SIGNALS
from whimbrel.train.device import peak_memory
from whimbrel.train.run_directory import as_number

__all__ = ["MemoryEstimate", "ProgressCallback", "RunSummary", "estimate_memory", "features"]

MAX_NAMES = 2
"""Maximum number of parameter names in a line."""
REDRAW_SECONDS = 0.1
"""Minimum time between two drawings of the progress bar, unless something is printed above it."""
MAX_SECONDS_LEFT = 10**9
BAR_WIDTHS = (8, 24)
"""Minimum and maximum width of the bar in columns; in narrow terminals it is omitted."""
ETA_STEPS = 20
"""Steps whose mean duration predicts the remaining time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory in bytes that does not depend on the batch size (no activations)."""

    weights: int
    gradients: int
    optimizer: int | None
    """None if unknown before the first step, as for third-party optimizers."""


REWARDS = ("rewards/margins", "rewards/accuracies")
"""Metrics of preference objectives that are printed for each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Facts to print before the first step."""

    device: str
    device_name: str
    parameters: int
    frozen_parameters: int
    memory: MemoryEstimate
    optimizer_table: tuple[ParameterRow, ...] = ()
    """Optimizer and settings of each parameter."""
    samples_per_step: int
    tokens_per_step: int | None = None
    """None if the sequence length is not known."""
    tokens_per_micro_batch: int | None = None
    accumulation: int
    total_steps: int
    first_step: int = 0
    flops_per_token: float | None = None
    peak_flops: float | None = None
    compile_seconds: float = 0.0
    features: tuple[str, ...] = ()
    """Enabled features: `bf16`, `compiled block`, `asynchronous saves`, `EMA 0.999`."""
    resumed_from: Path | None = None


def estimate_memory(model: nn.Module, optimizer: Optimizer | None) -> MemoryEstimate:
    """Bytes of weights, gradients, and the state that `optimizer` has or will have."""
    weights = [*model.parameters(), *model.buffers()]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    states = None if optimizer is None else state_bytes(optimizer)
    optimizer_bytes = None if states is None else sum(states.values())
    return MemoryEstimate(
        weights=sum(w.nbytes for w in weights),
        gradients=_gradient_bytes(trainable, optimizer),
        optimizer=optimizer_bytes,
    )


def _gradient_bytes(trainable: list[nn.Parameter], optimizer: Optimizer | None) -> int:
    """Gradient bytes; with optimizer_in_backward only the projected gradients or the largest single one."""
    if isinstance(optimizer, StepInBackward):
        return max(_bytes([parameter]) for parameter in trainable)
    if isinstance(optimizer, ProjectInBackward):
        inner = optimizer.optimizer
        sizes = (
            (p, p.numel() if inner.needs_full_grad(p) else inner.layout_of(p).low_rank_shape.numel()) for p in trainable
        )
        return sum(size * p.element_size() for p, size in sizes)
    return _bytes(trainable)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def features(config: TrainerConfig) -> tuple[str, ...]:
    """Names of the enabled features."""
    train, checkpoint = config.train, config.checkpoint
    enabled = {
        train.precision: train.precision != "fp32",
        f"fp8 {train.fp8_recipe}": train.fp8_recipe is not None,
        f"QAT {train.qat_recipe}": train.qat_recipe is not None,
        f"{train.weight_dtype} weights": train.weight_dtype is not None,
        f"compiled {train.compile_scope}": train.compile,
        f"recompute {train.recompute}": train.recompute != "none",
        "activations in host memory": train.activation_offloading,
        "optimizer in backward": train.optimizer_in_backward,
        "projected linears": train.projected_linears,
        "deterministic": train.deterministic,
        "anomaly detection": train.detect_anomaly,
        f"non-finite steps: {train.on_nonfinite}": train.on_nonfinite != "stop",
        "asynchronous saves": checkpoint.asynchronous,
        f"EMA {config.ema.decay}": config.ema.decay is not None,
        "early stopping": config.early_stopping.patience is not None,
        f"divergence: {config.divergence.action}": config.divergence.action is not None,
        "TensorBoard": config.log.tensorboard,
    }
    return tuple(name for name, on in enabled.items() if on)


class _StepLine:
    """A bar and fields in one line that fits the terminal: fields are dropped from the highest priority number on."""

    def __init__(self, total: int, completed: int, text: str) -> None:
        self.total, self.completed = total, completed
        self.fields: list[tuple[int, str]] = [(0, text)]
        """Priority and text, in the order of display."""
        self.columns = 0
        """Width of the line when it was last drawn."""

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        shown = sorted(self.fields)
        while len(shown) > 1 and len("  ".join(text for _, text in shown)) > options.max_width:
            shown.pop()
        text = "  ".join(field[1] for field in self.fields if field in shown)
        narrow, wide = BAR_WIDTHS
        width = min(wide, options.max_width - len(text) - 1)
        self.columns = min(len(text) + (width + 1) * (width >= narrow), options.max_width)
        line = Text(text, no_wrap=True, overflow="crop")
        if width < narrow:
            yield line
            return
        grid = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        grid.add_row(ProgressBar(total=self.total, completed=self.completed, width=width), line)
        yield grid


class _StepBar(Progress):
    """Draws a `_StepLine` below everything that is printed."""

    def __init__(self, console: Console, line: _StepLine) -> None:
        self.line = line
        # The thread of auto_refresh would redraw a wrapped line before `refresh` erases it.
        super().__init__(console=console, auto_refresh=False)

    def refresh(self) -> None:
        """Redraw. If the terminal has become narrower and wraps the last line, erase all its rows."""
        for _ in range(1, math.ceil(self.line.columns / max(self.console.width, 1))):
            self.console.control(Control((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)))
        super().refresh()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.line


class ProgressCallback(TrainerCallback):
    """Prints a summary, the steps and the result of a run.

    On a terminal, steps update a progress bar and everything else scrolls above it. Otherwise, or with `plain`, there
    is one line per event, which is easy to grep. `to_continue` says how to continue a run that has done all its steps.
    """

    def __init__(self, console: Console | None = None, *, plain: bool = False, to_continue: str | None = None) -> None:
        self._console = console or Console()
        self._plain = plain or not self._console.is_terminal
        self._to_continue = to_continue or (
            "increase train.steps or train.epochs to continue, or choose another output_dir for a new run"
        )
        self._enabled = True
        self._summary: RunSummary | None = None
        self._bar: _StepBar | None = None
        self._drawn = 0.0
        self._memory = ""
        self._seconds: deque[float] = deque(maxlen=ETA_STEPS)
        self._warnings = WriteWarnings()

    def on_init_end(self, **event: Any) -> None:
        """Print on the first rank only."""
        self._enabled = event["state"].is_world_process_zero

    def on_train_begin(self, **event: Any) -> None:
        """Print the summary: device, batch size, model, memory, optimizer, features, checkpoint."""
        summary = event["summary"]
        if summary.first_step >= summary.total_steps:
            past = summary.first_step > summary.total_steps
            position = f"{summary.first_step}{', past the last step,' if past else ' of'} {summary.total_steps}"
            self._print(f"Already at step {position}: nothing to do; {self._to_continue}")
            return
        self._summary = summary
        for line in _summary_lines(summary):
            self._print(line)
        if self._enabled and not self._plain:
            is_compiled = any(feature.startswith("compiled") for feature in summary.features)
            text = "first step (compiling takes up to minutes)" if is_compiled else "first step"
            self._bar = _StepBar(self._console, _StepLine(summary.total_steps, summary.first_step, text))
            with self._guarded():
                self._bar.start()

    def on_train_metrics(self, **event: Any) -> None:
        """Print a step, or update the progress bar."""
        metrics, summary = event["metrics"], self._summary
        if summary is None:
            return
        self._seconds.append(metrics["seconds"])
        left = sum(self._seconds) / len(self._seconds) * (summary.total_steps - metrics["step"])
        eta = str(timedelta(seconds=round(min(left, MAX_SECONDS_LEFT))))
        if self._bar is None:
            self._print(_step_line(metrics, summary.total_steps, eta))
            return
        is_due = metrics["step"] == summary.total_steps or time.monotonic() - self._drawn > REDRAW_SECONDS
        if is_due:
            self._drawn = time.monotonic()
            self._memory = _gib(peak_memory(event["trainer"].device), 1)
        self._bar.line.completed = metrics["step"]  # also drawn with the next message, and at the end
        self._bar.line.fields = [*_bar_fields(metrics, summary), (6, self._memory), (2, f"eta {eta}")]
        if is_due:
            with self._guarded():
                self._bar.refresh()

    def on_evaluate(self, **event: Any) -> None:
        metrics = []
        for key, value in event["metrics"].items():
            number = as_number(value)
            metrics.append(f"{key.removeprefix('eval_')} {value if number is None else f'{number:.4f}'}")
        self._print(f"validation after step {event['state'].global_step}: {'  '.join(metrics)}")

    def on_sample(self, **event: Any) -> None:
        self._print(f"sample after step {event['step']}:\n{event['text']}\n")

    def on_save(self, **event: Any) -> None:
        self._print(f"checkpoint after step {event['step']}: {event['checkpoint']}")

    def on_rollback(self, **event: Any) -> None:
        self._print(f"rolled back to step {event['step']}")

    def on_train_end(self, **event: Any) -> None:
        """Print the totals and why the run stopped; nothing if it failed, since the error is printed."""
        if self._bar is not None:
            with self._guarded():
                self._bar.stop()
            self._bar = None
        output, stop = event["output"], event["stopped_by"]
        if self._summary is None or output is None:
            return
        for line in _total_lines(output.metrics):
            self._print(line)
        if stop is not None and output.global_step < self._summary.total_steps:
            callback = event["trainer"].callbacks.by_name().get(stop.callback)
            reason, overwrites = getattr(callback, "reason", None), event["trainer"].config.overwrite_output_dir
            for line in _stop_lines(stop, reason, output.global_step, event["checkpoint"], overwrites=overwrites):
                self._print(line)

    def _print(self, text: str) -> None:
        """Print above the progress bar if there is one; otherwise write directly, since rich would wrap the line."""
        with self._guarded():
            if self._bar is not None:
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            elif self._enabled:
                self._console.file.write(text + "\n")
                self._console.file.flush()

    def _guarded(self) -> AbstractContextManager[None]:
        """Log a warning instead of failing when the console cannot be written (`| head`, full disk)."""
        return self._warnings.suppress(OSError, ValueError, target=getattr(self._console.file, "name", "the console"))


def _summary_lines(summary: RunSummary) -> Iterator[str]:
    yield f"Using device: {summary.device}"
    if summary.tokens_per_step is None:
        yield f"Total batch size: {summary.samples_per_step} samples"
    else:
        yield f"Total batch size: {summary.tokens_per_step}"
        yield f"Tokens per micro-batch: {summary.tokens_per_micro_batch}"
    yield f"Gradient accumulation steps: {summary.accumulation}"
    frozen = f" ({summary.frozen_parameters:,} frozen)" if summary.frozen_parameters else ""
    yield f"Model: {summary.parameters:,} parameters{frozen} on {summary.device_name}"
    length = f"Steps: {summary.total_steps:,}"
    if summary.tokens_per_step is not None:
        length += f" ({summary.total_steps * summary.tokens_per_step:,} tokens)"
    yield length
    yield f"Memory: {_memory(summary.memory)} (without activations)"
    yield from _optimizer_lines(summary.optimizer_table)
    if summary.peak_flops is not None and summary.flops_per_token is not None:
        frozen = ", 4 if frozen," if summary.frozen_parameters else ""
        yield (
            f"MFU: {summary.flops_per_token:,.0f} FLOPs per token (6 per parameter{frozen} + full attention) relative "
            f"to {summary.peak_flops / 1e12:,.0f} TFLOP/s (dense bf16)"
        )
    if summary.features:
        yield f"Features: {', '.join(summary.features)}"
    if summary.resumed_from is not None:
        yield f"Resumed from: {summary.resumed_from} (step {summary.first_step})"


def _memory(memory: MemoryEstimate) -> str:
    parts = [(memory.weights, "weights"), (memory.gradients, "gradients"), (memory.optimizer, "optimizer state")]
    known = [f"{format_bytes(size)} {name}" for size, name in parts if size is not None]
    return " + ".join(known) + (
        "" if memory.optimizer is not None else " + optimizer state (unknown before the first step)"
    )


def _optimizer_lines(rows: Iterable[ParameterRow]) -> Iterator[str]:
    """One line per update rule and learning rate; `whimbrel memory` prints one per parameter."""
    groups: dict[tuple[str, float, float], list[ParameterRow]] = {}
    for row in rows:
        groups.setdefault((row.rule, row.lr, row.weight_decay), []).append(row)
    for (rule, lr, decay), group in groups.items():
        known = [row.state_bytes for row in group if row.state_bytes is not None]
        state = f", {format_bytes(sum(known))} of state" if len(known) == len(group) else ""
        names = ", ".join(row.name for row in group[:MAX_NAMES]) + (", ..." if len(group) > MAX_NAMES else "")
        count = sum(row.count for row in group)
        tensors = f"{count} tensor{'s' * (count > 1)}"
        yield f"Optimizer: {rule} (lr={lr:g}, weight_decay={decay:g}) for {tensors}{state}: {names}"


def _step_line(metrics: dict[str, Any], total: int, eta: str) -> str:
    seconds, tokens = metrics["seconds"], metrics["tokens"]
    rate = f" token/s:{tokens / seconds:.2f}" if tokens and seconds else ""
    if "supervised_tokens" in metrics and seconds:
        rate += f" supervised_token/s:{metrics['supervised_tokens'] / seconds:.2f}"
    rewards = "".join(f" {name}:{metrics[name]:.4f}" for name in REWARDS if name in metrics)
    skipped = " skipped" if metrics.get("skipped") else ""
    loss = f"train_loss:{metrics['loss']:.4f}"
    state = f" lr:{metrics['lr']:.2e} norm:{metrics['grad_norm']:.2f} eta:{eta}"
    return f"step:{metrics['step']}/{total} {loss} train_time:{seconds * 1000:.0f}ms{rate}{state}{rewards}{skipped}"


def _bar_fields(metrics: dict[str, Any], summary: RunSummary) -> Iterator[tuple[int, str]]:
    """Priority and text of each field, in the order of display."""
    yield 0, f"step {metrics['step']}/{summary.total_steps}"
    yield 1, f"loss {metrics['loss']:.4f}"
    yield 4, f"lr {metrics['lr']:.2e}"
    yield 5, f"norm {metrics['grad_norm']:.2f}"
    if metrics["tokens"] and metrics["seconds"]:
        rate = metrics["tokens"] / metrics["seconds"]
        supervised = ""
        if "supervised_tokens" in metrics:
            supervised = f" ({metrics['supervised_tokens'] / metrics['seconds']:,.0f} supervised)"
        yield 3, f"{rate:,.0f} tok/s{supervised}"
        if summary.peak_flops is not None and summary.flops_per_token is not None:
            yield 7, f"MFU {rate * summary.flops_per_token / summary.peak_flops:.1%}"
    for name in REWARDS:
        if name in metrics:
            yield 8, f"{name} {metrics[name]:.3f}"


def _total_lines(metrics: dict[str, Any]) -> Iterator[str]:
    """Totals over all sessions of a run; the time excludes compilation and evaluation."""
    seconds, tokens = metrics["train_seconds"], metrics["num_input_tokens_seen"]
    yield f"Total time: {seconds:.2f}s ({seconds / 60:.2f} minutes)"
    if tokens:
        yield f"Total tokens processed: {tokens:,}"
        if seconds:
            yield f"Average tokens/sec: {tokens / seconds:.2f}"
    if metrics["compile_seconds"]:
        yield f"Compile time: {metrics['compile_seconds']:.2f}s (not included in the total)"
    yield f"Peak memory: {_gib(metrics['peak_memory'])}"


def _stop_lines(
    stop: StopRequest, reason: str | None, step: int, checkpoint: Path | None, *, overwrites: bool
) -> Iterator[str]:
    if stop.callback in {number.name for number in SIGNALS}:
        yield f"Interrupted by {stop.callback}"
    else:
        action = "Aborting" if stop.kind == "abort" else "Stopping"
        yield f"{action}: {reason or f'requested by {stop.callback} ({stop.event})'}"
    if stop.kind == "abort":
        latest = f"the latest checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint"
        yield f"Aborted at step {step} without saving; {latest}"
    else:
        remedy = "rerun without overwrite_output_dir to resume" if overwrites else "rerun the same command to resume"
        yield f"Stopped at step {step}, " + (
            f"saved to {checkpoint}: {remedy}" if checkpoint else "without a checkpoint"
        )


def _gib(size: int, digits: int = 2) -> str:
    return f"{size / 2**30:.{digits}f} GiB"
