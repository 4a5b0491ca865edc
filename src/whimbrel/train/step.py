"""One optimizer step: micro-batches, gradient accumulation, clipping, precision."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from whimbrel.distributed import DiLoCo, PipelineModel, World, clip_gradients_, gradient_norm, gradient_sync
from whimbrel.distributed.state import to_local
from whimbrel.optim import OptimizerInBackward
from whimbrel.precision import MixedPrecision
from whimbrel.train.batches import Batches, token_count
from whimbrel.train.device import Stopwatch
from whimbrel.train.objectives import (
    DummyBatch,
    FunctionObjective,
    LossOutput,
    ModelObjective,
    Objective,
    zero_backward,
)

__all__ = ["NonFiniteError", "Scheduler", "StepMetrics", "TrainStep"]


class Scheduler(Protocol):
    """A learning-rate scheduler, as in `torch.optim.lr_scheduler`."""

    def step(self) -> None:
        """Set the learning rates of the next step."""

    def get_last_lr(self) -> list[float]:
        """The current learning rates, one per parameter group."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NonFiniteError(Exception):
    """The loss or the gradient norm of a step is NaN or infinite; the trainer stops, or rolls back."""

    def __init__(self, step: int, loss: float, norm: float) -> None:
        super().__init__(f"non-finite loss or gradient at step {step}: loss {loss}, gradient norm {norm}")


class StepMetrics(NamedTuple):
    """Metrics of a finished step; `step` counts from 1, `skipped` steps left the weights unchanged."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    skipped: bool


@dataclass(slots=True)
class TrainStep:
    """Runs optimizer steps.

    Nothing in a step waits for the device. Its loss and gradient norm are copied to the host asynchronously, and
    `flush_metrics` reports them once they have arrived, usually one step later: the GPU never idles while Python reads
    a number. Skipping non-finite steps is the exception, since the decision comes before the optimizer step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    batches: Batches
    objective: Objective
    precision: MixedPrecision
    accumulation: int
    stopwatch: Stopwatch
    dispatch: Callable[[str], object]
    """Dispatches an event inside the step to the callbacks."""
    lr: Callable[[], float]
    """The learning rate to report."""
    training_step: Callable[[Any, Tensor], Tensor] | None = None
    """A subclass's `training_step(batch, num_items)`, which replaces our forward and backward pass."""
    world: World = field(default_factory=World)
    """The processes that train together."""
    outer: DiLoCo | None = None
    clip: float | None = None
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    _parameters: list[nn.Parameter] = field(init=False)
    _pending: list[_PendingMetrics] = field(default_factory=list)
    _step_end: Any = None
    """When the last step ended and the next one starts; None if something other than a step ran since then."""

    def __post_init__(self) -> None:
        if self.outer is not None:
            self.outer.start()
        self._parameters = list(self.model.parameters())  # cached: walking the module tree takes longer than clipping

    def run(self, step: int) -> int | None:
        """Run optimizer step number `step` (from 1); returns its number of tokens, or None at the end of an epoch."""
        start = self.stopwatch.mark() if self._step_end is None else self._step_end
        micro_batches: list[Any] = []
        while len(micro_batches) < self.accumulation and (batch := self.batches.next_batch()) is not None:
            micro_batches.append(batch)
        if not micro_batches:
            return None

        # The step's loss is one mean over the targets of all micro-batches of all ranks, so all are counted before the
        # first backward pass, and each loss is divided by the total.
        if isinstance(self.objective, FunctionObjective) and self.training_step is None:
            loss, extra = self._forward_backward_sums(micro_batches)
        else:
            with self.precision.autocast():
                counts = [self._count(batch) for batch in micro_batches]
            num_items = self.world.loss_divisor(torch.stack(counts).sum())
            loss, extra, _ = self._forward_backward(micro_batches, num_items)
            if self.objective.count_name is not None:
                extra[self.objective.count_name] = num_items * self.world.dp_size  # of all ranks
        norm = self._clip_gradients()
        if self.world.dp_size > 1:
            loss, norm, extra = self._mean_over_ranks(loss, norm, extra)
        lr = self.lr()
        self.dispatch("on_pre_optimizer_step")
        skipped = self.on_nonfinite == "skip" and not bool((loss + norm).isfinite())
        if skipped:
            self.precision.skip()
        else:
            skipped = not self.precision.step(self.optimizer)  # the fp16 scaler skips steps that overflow
        if not skipped:
            self.dispatch("on_optimizer_step")
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.outer is not None:
            self.outer.step(step)

        tokens = self.world.all_reduce_dp_int(sum(token_count(batch) for batch in micro_batches))
        values = _copy_to_host(loss, norm, *extra.values())
        self._step_end = self.stopwatch.mark()  # after the copy: once the device has passed it, the values are there
        self._pending.append(_PendingMetrics(step, values, tuple(extra), lr, tokens, start, self._step_end, skipped))
        return tokens

    def _forward_backward_sums(self, micro_batches: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Like `_forward_backward`, for targets that are counted in the forward pass: divides gradients afterwards."""
        device = self._parameters[0].device
        loss, extra, count = self._forward_backward(micro_batches, torch.ones((), device=device))
        num_items = self.world.loss_divisor(count)
        for parameter in self._parameters:
            grad: Any = parameter.grad
            if grad is not None:
                local = to_local(grad)
                local.div_(num_items.to(local.device))
        return loss / num_items, {name: value / num_items for name, value in extra.items()}

    def _forward_backward(
        self, micro_batches: list[Any], num_items: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The loss and the extra metrics of all micro-batches, and their number of targets if it is counted in the
        forward pass; accumulates their gradients.
        """
        if isinstance(self.model, PipelineModel):
            assert isinstance(self.objective, ModelObjective)
            inputs = [self.objective.stage_inputs(self.model, batch) for batch in micro_batches]
            return self.model.forward_backward(inputs, num_items), {}, num_items
        loss, count = torch.zeros((), device=num_items.device), torch.zeros((), device=num_items.device)
        extra: dict[str, Tensor] = {}
        for index, batch in enumerate(micro_batches, start=1):
            with gradient_sync(self.model, last=index == len(micro_batches)):
                output = self._run_micro_batch(batch, num_items)
            assert output.loss is not None
            loss += output.loss.detach()
            if output.num_targets is not None and not isinstance(batch, DummyBatch):
                count += output.num_targets
            for name, value in output.metrics.items():
                extra[name] = extra.get(name, 0.0) + value.detach()
            if index < len(micro_batches):
                self.dispatch("on_substep_end")
        return loss, extra, count

    def _run_micro_batch(self, batch: Any, num_items: Tensor) -> LossOutput:
        """Forward and backward pass; a filler has weight 0, even if its loss ignores `num_items`."""
        batch, is_filler = (batch.batch, True) if isinstance(batch, DummyBatch) else (batch, False)
        if self.training_step is not None:
            with zero_backward() if is_filler else contextlib.nullcontext():
                output = LossOutput(self.training_step(batch, num_items))  # runs its own backward pass
        else:
            with self.precision.autocast():
                output = self.objective(self.model, batch, num_items)
            assert output.loss is not None
            self.precision.scale(output.loss * 0 if is_filler else output.loss).backward()
        if not is_filler:
            return output
        return LossOutput(
            torch.zeros_like(num_items), None, {name: value * 0 for name, value in output.metrics.items()}
        )

    def flush_metrics(self, report: Callable[[StepMetrics, dict[str, float]], None], *, keep: int = 0) -> None:
        """Report the metrics of all steps but the last `keep`, waiting for the device.

        Raises NonFiniteError for a non-finite step that was not skipped.
        """
        while len(self._pending) > keep:
            pending = self._pending.pop(0)
            seconds = self.stopwatch.seconds(pending.start, pending.end)
            loss, norm, *extra = pending.values.tolist()
            if not pending.skipped and not (math.isfinite(loss) and math.isfinite(norm)):
                self._pending.clear()
                raise NonFiniteError(pending.step, loss, norm)
            metrics = StepMetrics(pending.step, loss, norm, pending.lr, pending.tokens, seconds, pending.skipped)
            report(metrics, dict(zip(pending.names, extra, strict=True)))

    def _count(self, batch: Any) -> Tensor:
        if isinstance(batch, DummyBatch):
            return torch.zeros_like(self.objective.count(self.model, batch.batch))
        return self.objective.count(self.model, batch)

    def reset_timer(self) -> None:
        """Do not count time since the last step toward the next one; call it before an evaluation or a save."""
        self._step_end = None

    def _mean_over_ranks(
        self, loss: Tensor, norm: Tensor, extra: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss and extra metrics of the global batch; the mean norm if ranks step on their own gradients."""
        values = [loss, *extra.values(), *([norm.to(loss)] if self.world.independent else [])]
        loss, *means = self.world.all_reduce_dp(torch.stack(values)) / self.world.dp_size
        norm = means.pop() if self.world.independent else norm
        return loss, norm, dict(zip(extra, means, strict=True))

    def _clip_gradients(self) -> Tensor:
        """Unscale and clip the gradients; returns their norm before clipping."""
        self.precision.unscale(self.optimizer)
        if isinstance(self.optimizer, OptimizerInBackward):
            norm = self.optimizer.grad_norm()  # the backward pass has freed the gradients
            if self.clip is not None:
                self.optimizer.clip_(self.clip, norm)
            return norm
        norm = gradient_norm(self._parameters, self.world)
        if self.clip is not None:
            clip_gradients_(self._parameters, self.clip, norm)
        return norm


@dataclass(frozen=True, slots=True)
class _PendingMetrics:
    """A step whose metrics are on their way to the host."""

    step: int
    values: Tensor
    """Loss, gradient norm, and the objective's extra metrics in the order of `names`."""
    names: tuple[str, ...]
    lr: float
    tokens: int
    start: Any
    end: Any
    skipped: bool


def _copy_to_host(*scalars: Tensor) -> Tensor:
    """Copy scalars to one host tensor; on CUDA asynchronously, readable once the stream has passed this point."""
    values = torch.stack([scalar.to(scalars[0].device).float() for scalar in scalars])
    if values.device.type != "cuda":
        return values.cpu()
    host = torch.empty(len(scalars), pin_memory=True)
    return host.copy_(values, non_blocking=True)
