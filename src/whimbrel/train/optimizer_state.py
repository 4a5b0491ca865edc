"""Checkpoint components of the optimizer and the learning-rate scheduler.

Moments and counters come from the checkpoint, settings from this run, as far as the two can be told apart. For an
optimizer built from the config they can. In an object created by the user, a group may mix counters with
settings (schedule-free and D-adaptation do), so each save also records the values that the object
started with: a setting whose initial value differs now was changed by the user and is kept; everything else is
restored.

Moments are saved as the ranks have them. Rows of a matrix are sharded: moments, projected moments (m x r), 8-bit codes
and their scales, whose blocks lie within a row, so they are split at any row without quantizing again. The 8-bit scales
of a vector are for blocks of 256 elements; FSDP2 must split it at multiples of that. Bases, counters and seeds are
complete on every rank, and saved once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.checkpoint import SavedTensor, read_full_state
from whimbrel.distributed import World
from whimbrel.distributed.state import Reordered, is_dtensor, row_orders
from whimbrel.optim import OptimizerInBackward, Schedule, restore_optimizer
from whimbrel.train.step import Scheduler

__all__ = ["OptimizerState", "SchedulerState"]

logger = logging.getLogger(__name__)

PER_PARAMETER = ("params", "names", "splits")
"""Param-group entries with one value per parameter."""
SCHEDULED_RATES = ("lr", "initial_lr")
"""Param-group entries computed by a torch scheduler: part of its state, not optimizer settings."""


class OptimizerState:
    """The state of an optimizer; create it right after the optimizer and its scheduler.

    If ranks have different parts of it, it is saved by parameter name, and each rank loads the parts that it needs.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None = None, world: World | None = None) -> None:
        self.optimizer, self._model, self._world = optimizer, model, world or World()
        self._initial_settings = _settings(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._has_names = all("names" in group for group in optimizer.param_groups)
        self._has_stages = self._world.layout.pp > 1
        self.is_sharded = self._has_stages or any(map(is_dtensor, parameters))
        """Whether ranks have different parts of the state."""
        if self._has_stages and not self._has_names:
            raise ConfigError("expected the name of an optimizer for a pipeline, got an object: pass its name")

    def state_dict(self) -> dict[str, Any]:
        """Moments, groups, the class, and the optimizer's initial settings."""
        state = {"class": _class_name(self.optimizer), "started": self._initial_settings, **self.optimizer.state_dict()}
        if self.is_sharded and self._has_names:
            orders = {} if self._model is None else row_orders(self._model)
            state |= _by_name(state, orders) | {"started": []}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore moments and counters; raises if the class or the parameters differ."""
        skip = "skip its state with --resume.skip=optimizer (resume_skip=('optimizer',) in Python)"
        remedy = f"choose another output_dir, or {skip}"
        _check_class("optimizer", state["class"], _class_name(self.optimizer), remedy)
        saved = {"state": state["state"], "param_groups": state["param_groups"]}
        try:
            if self._has_names:
                restore_optimizer(self.optimizer, saved, partial=self._has_stages)
            else:
                self._restore_user_optimizer(saved, state["started"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"the optimizer state in the checkpoint does not match the parameters or settings of the run "
                f"({error}): keep the optim settings, {remedy}"
            ) from error

    def load_parts(self, state: dict[str, Any]) -> None:
        """Read the parts of the moments that this rank needs, and restore them."""
        state = read_full_state({name: value for name, value in state.items() if name != "state"}) | {
            "state": state["state"]
        }
        if isinstance(state["param_groups"], dict):
            state |= _by_index(state)
        parameters = self._parameters(state["param_groups"])
        orders = {} if self._model is None else row_orders(self._model)
        state["state"] = {
            index: {
                name: self._read(*parameters[index], name, value, orders) if isinstance(value, SavedTensor) else value
                for name, value in moments.items()
            }
            for index, moments in state["state"].items()
            if index in parameters
        }
        self.load_state_dict(state)

    def _parameters(self, saved_groups: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, Tensor]]:
        """This rank's parameters and their names by their index in a saved state."""
        groups = self.optimizer.param_groups
        if not self._has_names:
            pairs = zip(groups, saved_groups, strict=False)
            return {
                index: ("", parameter)
                for group, saved in pairs
                for parameter, index in zip(group["params"], saved["params"], strict=False)
            }
        current = {
            name: parameter for group in groups for name, parameter in zip(group["names"], group["params"], strict=True)
        }
        return {
            index: (name, current[name])
            for saved in saved_groups
            for name, index in zip(saved.get("names", ()), saved["params"], strict=False)
            if name in current
        }

    def _read(self, owner: str, parameter: Tensor, name: str, saved: SavedTensor, orders: Mapping[str, Tensor]) -> Any:
        """A saved moment of `parameter`, sharded as the optimizer has it or will have it."""
        current = self.optimizer.state.get(parameter, {}).get(name)
        target = next(
            (t for t in (current, parameter) if t is not None and is_dtensor(t) and t.shape == saved.shape), None
        )
        return saved.full() if target is None else saved.like(target, orders.get(owner))

    def _restore_user_optimizer(self, saved: dict[str, Any], initial_settings: list[dict[str, Any]]) -> None:
        """Restore an optimizer created by the user, except for settings that were changed since the save."""
        has_own_schedule = all("peak_lr" in group for group in self.optimizer.param_groups)
        self.optimizer.load_state_dict(saved)
        for group, current, saved_initial in zip(
            self.optimizer.param_groups, self._initial_settings, initial_settings, strict=True
        ):
            changed = {
                name: value
                for name, value in current.items()
                if name not in saved_initial or not _equal(value, saved_initial[name])
            }
            if not has_own_schedule:
                for name in [name for name in SCHEDULED_RATES if name in changed and name in saved_initial]:
                    logger.warning(
                        "ignoring %s = %s of the optimizer passed in: its scheduler resumes with %s from the "
                        "checkpoint", name, changed.pop(name), saved_initial[name],
                    )  # fmt: skip
            group.update(changed)


def _by_name(state: Mapping[str, Any], orders: Mapping[str, Tensor]) -> dict[str, Any]:
    """Moments and group options by parameter name: the same on all ranks, whichever parameters they have."""
    moments, options = {}, {}
    for group in state["param_groups"]:
        shared = {name: value for name, value in group.items() if name not in PER_PARAMETER}
        for i, (index, owner) in enumerate(zip(group["params"], group["names"], strict=True)):
            own = {name: group[name][i] for name in PER_PARAMETER if name in group and name not in ("params", "names")}
            options[owner] = shared | own
            moments[owner] = {
                name: Reordered(value, orders[owner]) if owner in orders and is_dtensor(value) else value
                for name, value in state["state"].get(index, {}).items()
            }
    return {"state": moments, "param_groups": options}


def _by_index(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_by_name`, with one group per parameter."""
    groups = [
        {name: [value] if name in PER_PARAMETER else value for name, value in options.items()}
        | {"params": [index], "names": [owner]}
        for index, (owner, options) in enumerate(state["param_groups"].items())
    ]
    moments = {index: found for index, owner in enumerate(state["param_groups"]) if (found := state["state"][owner])}
    return {"state": moments, "param_groups": groups}


class SchedulerState:
    """The state of a learning-rate scheduler; create it right after the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._initial_values = _initial_values(scheduler)

    def state_dict(self) -> dict[str, Any]:
        """Its position, its class, and its initial values."""
        return {
            "class": _class_name(self.scheduler),
            "started": self._initial_values,
            "state": dict(self.scheduler.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`, including the settings of a scheduler created by the user; raises if the class differs.

        A torch scheduler computes each rate from the previous one, so its settings cannot change mid-run.
        """
        skip = "skip its state with --resume.skip=scheduler (resume_skip=('scheduler',) in Python)"
        remedy = f"pass the same scheduler, choose another output_dir, or {skip}"
        _check_class("scheduler", state["class"], _class_name(self.scheduler), remedy)
        self.scheduler.load_state_dict(state["state"])
        if isinstance(self.scheduler, Schedule):
            return
        for name, value in self._initial_values.items():
            if name in state["started"] and not _equal(value, state["started"][name]):
                logger.warning(
                    "ignoring %s = %s of the scheduler passed in: using %s from the checkpoint",
                    name, value, state["started"][name],
                )  # fmt: skip


def _check_class(component: str, saved: str, current: str, remedy: str) -> None:
    # A class defined in a script is in __main__, or in a named module if the script is imported.
    from_script = ":" not in saved or ":" not in current
    if saved != current and not (from_script and saved.rpartition(":")[2] == current.rpartition(":")[2]):
        raise CheckpointError(
            f"expected the state of the {component} {current}, got {saved} in the checkpoint: {remedy}"
        )


def _class_name(component: object) -> str:
    """The class name; for a wrapper that steps in backward, the wrapped optimizer's."""
    cls = type(component.optimizer if isinstance(component, OptimizerInBackward) else component)
    package = cls.__module__.partition(".")[0]
    return cls.__qualname__ if package == "__main__" else f"{package}:{cls.__qualname__}"


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


def _initial_values(scheduler: Scheduler) -> dict[str, Any]:
    """Attributes of a scheduler that a user could have set: numbers, strings, and lists of them."""
    return {
        name: value
        for name, value in scheduler.state_dict().items()
        if not name.startswith("_")
        and all(isinstance(item, int | float | str) for item in (value if isinstance(value, list) else [value]))
    }


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return float(a) == float(b)
    return bool(a == b)
