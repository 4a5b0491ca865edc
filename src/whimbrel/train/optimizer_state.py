"""Optimizer and learning-rate scheduler in a checkpoint.

Moments and counters come from the checkpoint, settings from this run, as far as the two can be told apart. For an
optimizer built from the configuration they can. For an object that the user made, a group may hold counters beside
settings (schedule-free and D-adaptation methods do that), so each save also records the values that the object started
with: a setting that starts with another value now was changed by the user and is kept, everything else is restored.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.optim import Optimizer

from whimbrel.base.errors import CheckpointError
from whimbrel.optim import InBackward, Schedule, restore_optimizer
from whimbrel.train.loop import Scheduler

__all__ = ["OptimizerState", "SchedulerState"]

logger = logging.getLogger(__name__)
RATES = ("lr", "initial_lr")
"""Group entries that a torch scheduler computes: they belong to its state, not to the settings of the optimizer."""


class OptimizerState:
    """The state of an optimizer; create it right after the optimizer and its scheduler."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._started = _settings(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Moments, groups, the class, and the optimizer's initial settings."""
        return {"class": _class_name(self.optimizer), "started": self._started, **self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore moments and counters; raises if the class or the parameters differ."""
        skip = "leave its state out with --resume.skip=optimizer (resume_skip=('optimizer',) in Python)"
        remedy = f"name another output_dir, or {skip}"
        _check_class("optimizer", state["class"], _class_name(self.optimizer), remedy)
        saved = {"state": state["state"], "param_groups": state["param_groups"]}
        try:
            if all("names" in group for group in self.optimizer.param_groups):
                restore_optimizer(self.optimizer, saved)
            else:
                self._restore_given(saved, state["started"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint holds the state of other parameters, or of other settings ({error}): keep the "
                f"settings of optim, {remedy}"
            ) from error

    def _restore_given(self, saved: dict[str, Any], started: list[dict[str, Any]]) -> None:
        """Restore an optimizer created by the user, except for settings that were changed since the save."""
        ours = all("peak_lr" in group for group in self.optimizer.param_groups)  # whose scheduler sets the rates
        self.optimizer.load_state_dict(saved)
        for group, now, then in zip(self.optimizer.param_groups, self._started, started, strict=True):
            changed = {name: value for name, value in now.items() if name not in then or not _same(value, then[name])}
            if not ours:
                for name in [name for name in RATES if name in changed and name in then]:
                    logger.warning(
                        "%s = %s of the given optimizer does not apply: the given scheduler resumes with %s of the "
                        "checkpoint", name, changed.pop(name), then[name],
                    )  # fmt: skip
            group.update(changed)


class SchedulerState:
    """The state of a learning-rate scheduler; create it right after the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._started = _plain_values(scheduler)

    def state_dict(self) -> dict[str, Any]:
        """Its position, its class, and its initial values."""
        return {
            "class": _class_name(self.scheduler),
            "started": self._started,
            "state": dict(self.scheduler.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`, including the settings of a scheduler created by the user; raises if the class differs.

        A torch scheduler computes each rate from the previous one, so its settings cannot change mid-run.
        """
        skip = "leave its state out with --resume.skip=scheduler (resume_skip=('scheduler',) in Python)"
        remedy = f"give that one, name another output_dir, or {skip}"
        _check_class("scheduler", state["class"], _class_name(self.scheduler), remedy)
        self.scheduler.load_state_dict(state["state"])
        if isinstance(self.scheduler, Schedule):
            return
        for name, value in self._started.items():
            if name in state["started"] and not _same(value, state["started"][name]):
                logger.warning(
                    "%s = %s of the given scheduler does not apply: %s of the checkpoint does",
                    name, value, state["started"][name],
                )  # fmt: skip


def _check_class(what: str, saved: str, own: str, remedy: str) -> None:
    script = ":" not in saved or ":" not in own  # a class of a script has another module when it is imported
    if saved != own and not (script and saved.rpartition(":")[2] == own.rpartition(":")[2]):
        raise CheckpointError(f"the checkpoint holds the state of the {what} {saved}, and this run has {own}: {remedy}")


def _class_name(part: object) -> str:
    """The class name; for a step-in-backward wrapper, that of the wrapped optimizer."""
    kind = type(part.optimizer if isinstance(part, InBackward) else part)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if package == "__main__" else f"{package}:{kind.__qualname__}"


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups without parameters and their names."""
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in ("params", "names")
        }
        for group in optimizer.state_dict()["param_groups"]
    ]


def _plain_values(scheduler: Scheduler) -> dict[str, Any]:
    """Attributes of a scheduler that a user could have set: numbers, strings, and lists of them."""
    return {
        name: value
        for name, value in scheduler.state_dict().items()
        if not name.startswith("_")
        and all(isinstance(item, int | float | str) for item in (value if isinstance(value, list) else [value]))
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return float(one) == float(other)
    return bool(one == other)
