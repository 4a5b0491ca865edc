"""Optimizers that work during backward, so that whole gradients need not wait for its end.

`step_in_backward` moves each parameter as soon as its gradient is there, and frees it: one gradient exists at a time,
and nothing may depend on all of them together. `project_in_backward` (in `project`) has no such price.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from whimbrel.base.errors import OptimizerError
from whimbrel.optim.careful import run_eagerly
from whimbrel.optim.replicas import are_replicated

__all__ = ["InBackward", "StepInBackward", "step_in_backward"]

PER_PARAMETER = ("params", "param_names", "names", "splits")
"""Entries of a group that hold one value for each parameter."""


def step_in_backward(optimizer: torch.optim.Optimizer) -> StepInBackward:
    """Have backward itself step `optimizer`, one parameter at a time; undone by `remove()`."""
    return StepInBackward(optimizer)


class InBackward(torch.optim.Optimizer):
    """Stands in for an optimizer: same groups, same state, and a state dict that either of them loads."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, InBackward) or getattr(optimizer, "works_in_backward", False):
            raise OptimizerError("the optimizer works in backward already: remove() the first before a second")
        self.optimizer = optimizer
        self.defaults = optimizer.defaults
        self._handles: list[Any] = []
        self._share()

    @abstractmethod
    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the step together."""

    @abstractmethod
    def clip_(self, longest: float, norm: Tensor) -> None:
        """Scale the gradients of the step, whose norm is `norm`, to be no longer than `longest`."""

    def state_dict(self) -> dict[str, Any]:
        """As of the optimizer itself."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The state of a run that worked in backward, or of one that did not."""
        self.optimizer.load_state_dict(state_dict)
        self._share()

    def reset(self) -> None:
        """Have the optimizer forget moments and steps, where it can."""
        if not hasattr(self.optimizer, "reset"):
            raise OptimizerError(f"{type(self.optimizer).__name__} has no reset(): build another")
        self.optimizer.reset()

    def __getattr__(self, name: str) -> Any:
        """What the optimizer has beyond the step, such as its hooks."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: a group must be there before backward is told of it."""
        raise OptimizerError("a group cannot be added once the optimizer works in backward: add it before")

    def remove(self) -> torch.optim.Optimizer:
        """Let backward be; the optimizer, to be stepped as usual again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.optimizer.works_in_backward = False  # type: ignore[attr-defined]
        return self.optimizer

    def _attach(self, handles: Iterable[Any]) -> None:
        """The last of construction: from here on backward works."""
        self._handles += handles
        self.optimizer.works_in_backward = True  # type: ignore[attr-defined]

    def _share(self) -> None:
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


class StepInBackward(InBackward):
    """Backward moves each parameter and frees its gradient; weights have moved before all gradients are known."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise OptimizerError("LBFGS moves all parameters together: it cannot step in backward, use another")
        super().__init__(optimizer)
        if are_replicated(p for group in self.param_groups for p in group["params"]):
            raise OptimizerError(
                "weights would move in backward before gradients are averaged over ranks: use project_in_backward with "
                "a process_group, or step after backward"
            )
        self._norms: dict[Tensor, Tensor] = {}
        self._begun = False
        self._attach(
            parameter.register_post_accumulate_grad_hook(self._hook(group, index))
            for group in range(len(self.param_groups))
            for index, parameter in enumerate(self.param_groups[group]["params"])
            if parameter.requires_grad
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The end of a step: backward has moved the weights already."""
        loss = None if closure is None else closure()
        self._begun = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The end of a step; gradients are gone already."""
        self._begun = False

    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the last step together, each measured before it was freed."""
        norms = [self._norms[p] for group in self.param_groups for p in group["params"] if p in self._norms]
        if not norms:
            return torch.zeros(())
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        return total

    def clip_(self, longest: float, norm: Tensor) -> None:
        """Refused: the weights have moved."""
        raise OptimizerError("gradients cannot be clipped once backward has stepped by them: clip none, or project")

    def _hook(self, group: int, index: int) -> Callable[[Tensor], None]:
        def move(parameter: Tensor) -> None:
            self._move(self.param_groups[group], index, parameter)

        return move

    @run_eagerly
    def _move(self, group: dict[str, Any], index: int, parameter: Tensor) -> None:
        """Step a group of one: the optimizer sees nothing but this parameter."""
        if not self._begun:
            self._norms.clear()
            self._begun = True
        if parameter in self._norms:
            raise OptimizerError(
                f"a parameter of the shape {tuple(parameter.shape)} got a second gradient in one step, and stepping in "
                "backward has used the first: accumulate no micro-batches, or call step() after each backward"
            )
        if parameter.grad is None:
            return
        self._norms[parameter] = torch.linalg.vector_norm(parameter.grad)
        count = len(group["params"])
        alone = {
            name: [value[index]] if name in PER_PARAMETER and isinstance(value, list) and len(value) == count else value
            for name, value in group.items()
        }
        settings = {name: value for name, value in alone.items() if name != "params"}
        self.optimizer.param_groups = [dict(alone)]
        try:
            self.optimizer.step()
            (stepped,) = self.optimizer.param_groups
        finally:
            self.optimizer.param_groups = self.param_groups
        if {name: value for name, value in stepped.items() if name != "params"} != settings:
            raise OptimizerError(
                f"{type(self.optimizer).__name__} keeps state for whole groups: it cannot step in backward, use another"
            )
        parameter.grad = None
