"""The loop: steps, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from whimbrel.base.errors import TrainingError
from whimbrel.models import IGNORE_INDEX
from whimbrel.train.device import Stopwatch
from whimbrel.train.watch import StepRecord, Watcher

__all__ = ["Batches", "Loop", "Position"]


class Batches(Protocol):
    """Where micro-batches come from."""

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, already on the device."""


@dataclass(slots=True)
class Position:
    """How far a run is: all that a resume restores besides the state of the parts."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """The numbers, by name."""
        return {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` says."""
        self.step, self.tokens, self.seconds = int(state["step"]), int(state["tokens"]), float(state["seconds"])


@dataclass(slots=True)
class Loop:
    """Runs steps. Owns no files, processes or dtype rules; those come in ready-made."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    accumulation: int
    total_steps: int
    lr: float
    lr_factor: Callable[[int], float]
    autocast: Callable[[], AbstractContextManager[Any]]
    stopwatch: Stopwatch
    position: Position
    clip: float | None = None
    documents: Callable[[Tensor], Tensor | None] | None = None
    watchers: Sequence[Watcher] = ()
    _pending: list[_Pending] = field(default_factory=list)

    def run(self, until: int, stopping: Callable[[], bool] = lambda: False) -> None:
        """Step until the position is `until` or `stopping` says so; every record has been seen when this returns."""
        mark = self.stopwatch.mark()
        while self.position.step < until and not stopping():
            self._pending.append(self._step(mark))
            mark = self._pending[-1].end
            self._report(keep=1)  # the step before: its numbers are there, or nearly, while this one still runs
        self._report(keep=0)

    def _step(self, start: Any) -> _Pending:
        """One optimizer step; nothing here waits for the device."""
        factor = self.lr_factor(self.position.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        micro_batches = [self.batches.next_batch() for _ in range(self.accumulation)]
        valid = torch.stack([(y != IGNORE_INDEX).sum() for _, y in micro_batches]).sum().clamp(min=1)
        loss = torch.zeros((), device=valid.device)
        for x, y in micro_batches:
            with self.autocast():
                part = self.model(x, y, loss_divisor=valid, **self.extras(x)).loss
            part.backward()
            loss += part.detach()
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(y.numel() for _, y in micro_batches)
        self.position.step += 1
        self.position.tokens += tokens
        return _Pending(self.position.step - 1, _to_host(loss, norm), factor, tokens, start, self.stopwatch.mark())

    def extras(self, x: Tensor) -> dict[str, Tensor | None]:
        """What the model is given besides a batch."""
        return {} if self.documents is None else {"documents": self.documents(x)}

    def _report(self, keep: int) -> None:
        """Hand over all finished steps but the last `keep`."""
        while len(self._pending) > keep:
            done = self._pending.pop(0)
            seconds = self.stopwatch.seconds(done.start, done.end)
            loss, norm = (float(value) for value in done.numbers)
            self.position.seconds += seconds
            if not done.numbers.isfinite().all():
                self._pending.clear()
                raise TrainingError(
                    f"step {done.step} has the loss {loss} and the gradient norm {norm}: lower optim.lr or set "
                    "train.clip; nothing was saved since"
                )
            record = StepRecord(
                step=done.step,
                total=self.total_steps,
                loss=loss,
                lr=self.lr * done.factor,
                grad_norm=norm,
                seconds=seconds,
                tokens=done.tokens,
            )
            for watcher in self.watchers:
                watcher.on_step(record)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that was given to the device and whose numbers are on their way."""

    step: int
    numbers: Tensor
    factor: float
    tokens: int
    start: Any
    end: Any


def _to_host(loss: Tensor, norm: Tensor) -> Tensor:
    """Loss and norm on their way to the CPU; readable once the device has passed this point."""
    numbers = torch.stack((loss, norm.float()))
    if numbers.device.type != "cuda":
        return numbers.cpu()
    host = torch.empty(2, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)
