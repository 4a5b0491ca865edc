"""The loop: one optimizer step, and the numbers it leaves behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from whimbrel.optim import InBackward
from whimbrel.precision import PrecisionPlan
from whimbrel.train.batches import Batches, token_count
from whimbrel.train.device import Stopwatch
from whimbrel.train.outputs import Objective

__all__ = ["Loop", "NonFiniteError", "Scheduler", "StepMetrics"]


class Scheduler(Protocol):
    """What sets learning rates."""

    def step(self) -> None:
        """Set the rates of the next step."""

    def get_last_lr(self) -> list[float]:
        """The rates in force, one for each group."""

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` says."""


class NonFiniteError(Exception):
    """A step whose loss or gradient norm is not finite; the trainer decides what becomes of the run.

    Its message counts steps from 0, as the log and the progress lines do.
    """

    def __init__(self, step: int, loss: float, norm: float) -> None:
        super().__init__(f"step {step - 1} has the loss {loss} and the gradient norm {norm}")


class StepMetrics(NamedTuple):
    """The numbers of a finished step; `step` is how many were done with it."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    skipped: bool


@dataclass(slots=True)
class Loop:
    """Runs steps. Owns no files, processes or dtype rules; those come in ready-made.

    Nothing in a step waits for the device: its numbers are on their way when it returns, and `settle` hands them over
    once they have arrived. Skipping steps that are not finite is the exception, since the choice must be made first.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    batches: Batches
    objective: Objective
    precision: PrecisionPlan
    accumulation: int
    stopwatch: Stopwatch
    tell: Callable[[str], object]
    """Tells the callbacks of an event inside a step."""
    lr: Callable[[], float]
    """The learning rate to report."""
    training_step: Callable[[Any, Tensor], Tensor] | None = None
    """Forward and backward pass of a micro-batch by a trainer subclass, given the number of targets in the step."""
    clip: float | None = None
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    _parameters: list[nn.Parameter] = field(init=False)
    _pending: list[_Pending] = field(default_factory=list)
    _mark: Any = None

    def __post_init__(self) -> None:
        self._parameters = list(self.model.parameters())  # once: to walk the modules takes longer than to clip

    def step(self, number: int) -> int | None:
        """One optimizer step, to be the `number`th; the tokens it took, or None where the pass had ended."""
        start = self.stopwatch.mark() if self._mark is None else self._mark
        micro_batches: list[Any] = []
        while len(micro_batches) < self.accumulation and (batch := self.batches.next_batch()) is not None:
            micro_batches.append(batch)
        if not micro_batches:
            return None
        with self.precision.autocast():
            counts = [self.objective.count(batch) for batch in micro_batches]
        total = torch.stack(counts).sum().clamp(min=1)
        loss = torch.zeros((), device=total.device)
        for index, (batch, count) in enumerate(zip(micro_batches, counts, strict=True), start=1):
            loss += self._pass(batch, total, count)
            if index < len(micro_batches):
                self.tell("on_substep_end")
        norm = self._finish_gradients()
        lr = self.lr()
        self.tell("on_pre_optimizer_step")
        skipped = self.on_nonfinite == "skip" and not bool((loss + norm).isfinite())
        if skipped:
            self.precision.skip()
        else:
            skipped = not self.precision.step(self.optimizer)
        if not skipped:
            self.tell("on_optimizer_step")
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(token_count(batch) for batch in micro_batches)
        numbers = _to_host(loss, norm)
        self._mark = self.stopwatch.mark()  # after the copy: whoever waits for it may read the numbers
        self._pending.append(_Pending(number, numbers, lr, tokens, start, self._mark, skipped))
        return tokens

    def settle(self, keep: int, report: Callable[[StepMetrics], None]) -> None:
        """Hand over all steps but the last `keep`; what is not finite is raised, unless it was skipped."""
        while len(self._pending) > keep:
            done = self._pending.pop(0)
            seconds = self.stopwatch.seconds(done.start, done.end)
            loss, norm = done.numbers.tolist()
            if not done.skipped and not (math.isfinite(loss) and math.isfinite(norm)):
                self._pending.clear()
                raise NonFiniteError(done.step, loss, norm)
            report(StepMetrics(done.step, loss, norm, done.lr, done.tokens, seconds, done.skipped))

    def pause(self) -> None:
        """Something else than a step comes next: its time is not the next step's."""
        self._mark = None

    def _pass(self, batch: Any, total: Tensor, count: Tensor) -> Tensor:
        """Forward and backward pass of a micro-batch; returns its share of the step's loss."""
        if self.training_step is not None:
            return self.training_step(batch, total)
        with self.precision.autocast():
            part = self.objective.loss(batch, total, count)
        self.precision.scale(part).backward()
        return part.detach()

    def _finish_gradients(self) -> Tensor:
        """Unscale, measure and clip."""
        self.precision.unscale(self.optimizer)
        if isinstance(self.optimizer, InBackward):
            norm = self.optimizer.grad_norm()  # the gradients are gone
            if self.clip is not None:
                self.optimizer.clip_(self.clip, norm)
            return norm
        norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(self._parameters, self.clip, norm)
        return norm


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that was given to the device and whose numbers are on their way."""

    step: int
    numbers: Tensor
    lr: float
    tokens: int
    start: Any
    end: Any
    skipped: bool


def _to_host(loss: Tensor, norm: Tensor) -> Tensor:
    """Loss and norm on their way to the CPU; readable once the device has passed this point."""
    numbers = torch.stack((loss, norm.float()))
    if numbers.device.type != "cuda":
        return numbers.cpu()
    host = torch.empty(2, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)
