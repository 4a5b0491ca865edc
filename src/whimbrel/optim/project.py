"""Project in backward: of each gradient only its projection waits for the step, and the gradient itself is freed.

R_acc += G Q, one micro-batch after the other, then one step after the last: exact, since projecting is linear. A matrix
whose basis is due keeps its whole gradient for that step; bases are due for few matrices at a time. With `model`, its
linear layers never make their gradients at all (see `linear`).

The norm of all gradients, for clipping: exact while one micro-batch makes a step, as each gradient is measured before
it is freed. Otherwise |G|^2 is estimated as |R|^2 + |G w - R Q^T w|^2 / 16, w being 16 Gaussian directions: what the
basis holds is exact, what it leaves out is right on average, about 1% for a whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from whimbrel.base.errors import OptimizerError
from whimbrel.optim.composed import Composed
from whimbrel.optim.in_backward import InBackward
from whimbrel.optim.linear import Probe, ProjectedLinear

__all__ = ["ProjectInBackward", "project_in_backward"]

DIRECTIONS = 16
"""Of the sketch by which the length of a gradient is estimated."""


def project_in_backward(
    optimizer: Composed, *, accumulation: int = 1, model: nn.Module | None = None, dtype: torch.dtype | None = None
) -> ProjectInBackward:
    """Have backward project gradients for `optimizer`; undone by `remove()`.

    `accumulation` is the number of micro-batches that make a step. `model`: its linear layers whose weights move in a
    subspace compute the projection in place of the gradient. `dtype` is that of the projections that wait, by default
    each parameter's own, in which its gradients would wait.
    """
    return ProjectInBackward(optimizer, accumulation=accumulation, model=model, dtype=dtype)


class ProjectInBackward(InBackward):
    """Stands in for a composed optimizer, whose steps it feeds with projections."""

    optimizer: Composed

    def __init__(
        self, optimizer: Composed, *, accumulation: int, model: nn.Module | None, dtype: torch.dtype | None
    ) -> None:
        if not isinstance(optimizer, Composed):
            raise OptimizerError(
                f"{type(optimizer).__name__} does not move in a subspace that gradients can be projected to"
            )
        super().__init__(optimizer)
        self.accumulation, self.dtype = accumulation, dtype
        self._squares: dict[Tensor, Tensor] = {}
        self._sketches: dict[Tensor, Tensor] = {}
        self._directions: dict[tuple[int, torch.device], Tensor] = {}
        params = [p for group in self.param_groups for p in group["params"]]
        self._lowered = [p for p in params if p.requires_grad and not optimizer.needs_whole(p)]
        if not optimizer.projects:
            raise OptimizerError(
                f"{type(optimizer).__name__} needs the whole gradient of every parameter, so none can be projected in "
                "backward: use one that moves by projections alone (galore_warm, qgalore), or step in backward"
            )
        self._linears = {} if model is None else self._take_over(model)
        self._handles += [p.register_post_accumulate_grad_hook(self._project) for p in self._lowered]
        self._arm()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step by what was projected, and by whole gradients where there are such."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._collect()
        self.optimizer.step()
        self._forget()
        self._arm()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients and projections."""
        self.optimizer.zero_grad(set_to_none)
        self.optimizer.projected.clear()
        self._forget()

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the step together; exact or estimated, as the head of this file says."""
        self._collect()
        squares = []
        for group in self.param_groups:
            for p in group["params"]:
                if (low := self.optimizer.projected.get(p)) is not None:
                    squares.append(self._squares[p] if p in self._squares else self._estimate(p, low))
                if p.grad is not None:
                    squares.append(torch.linalg.vector_norm(p.grad, dtype=torch.float32).square())
        total: Tensor = torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
        return total

    @torch.no_grad()
    def clip_(self, longest: float, norm: Tensor) -> None:
        """Scale gradients and projections alike."""
        self._collect()
        scale = (longest / (norm + 1e-6)).clamp(max=1.0)
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        for tensor in (*grads, *self.optimizer.projected.values()):
            tensor.mul_(scale.to(tensor.device, tensor.dtype))

    def remove(self) -> torch.optim.Optimizer:
        """Let backward be, and give linear layers their own forward back."""
        for module in self._linears:
            module.__class__ = nn.Linear
            del module.probe
        self._linears = {}
        return super().remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The state of either mode; which bases are due comes with it."""
        super().load_state_dict(state_dict)
        self._arm()

    @torch.no_grad()
    def _project(self, parameter: Tensor) -> None:
        """The hook: project the gradient of a micro-batch and free it, unless it is wanted whole."""
        if parameter.grad is None or self.optimizer.refreshes(parameter):
            return
        grad = self.optimizer.matrix(parameter, parameter.grad)
        basis = self.optimizer.basis(parameter)
        low = (grad @ basis.to(grad.dtype)).to(self.dtype or parameter.dtype)
        if self.accumulation == 1 and parameter not in self.optimizer.projected:
            self._squares[parameter] = torch.linalg.vector_norm(grad, dtype=torch.float32).square()
        else:
            self._squares.pop(parameter, None)
            _add(self._sketches, parameter, grad @ self._sketch(grad.shape[-1], grad.device).to(grad.dtype))
        _add(self.optimizer.projected, parameter, low)
        parameter.grad = None

    def _estimate(self, parameter: Tensor, low: Tensor) -> Tensor:
        """|G|^2 from R and the sketch of G."""
        basis = self.optimizer.basis(parameter)
        directions = self._sketch(basis.shape[-2], basis.device)
        rest = self._sketches[parameter].float() - low.float() @ (basis.mT @ directions)
        return low.float().square().sum() + rest.square().sum() / DIRECTIONS

    def _sketch(self, width: int, device: torch.device) -> Tensor:
        """The Gaussian directions for matrices of `width` columns; always the same."""
        if (width, device) not in self._directions:
            generator = torch.Generator(device).manual_seed(width)
            self._directions[width, device] = torch.randn(width, DIRECTIONS, generator=generator, device=device)
        return self._directions[width, device]

    def _take_over(self, model: nn.Module) -> dict[Any, Tensor]:
        """Give each linear layer whose weight moves in a subspace a probe; the layers and their weights."""
        lowered = {id(p) for p in self._lowered}
        found: dict[Any, Tensor] = {}
        for module in model.modules():
            if type(module) is not nn.Linear or id(module.weight) not in lowered:
                continue
            if self.optimizer.slot(module.weight).basis_codec is not None:  # a random basis is drawn, not kept
                module.__class__ = ProjectedLinear
                module.probe = self._probe(module.weight)  # type: ignore[assignment]
                found[module] = module.weight
        return found

    def _probe(self, weight: Tensor) -> Probe:
        slot = self.optimizer.slot(weight)
        sketch = self._sketch(slot.shape[-1], weight.device)
        return Probe(slot, slot.stored(self.state[weight], "basis"), sketch, self.dtype or weight.dtype)

    def _arm(self) -> None:
        """Before a step: linear layers whose basis is due make their whole gradient in it."""
        for module, weight in self._linears.items():
            module.probe.on = not self.optimizer.refreshes(weight)

    def _collect(self) -> None:
        """Take over what arrived at the probes."""
        for module, weight in self._linears.items():
            probe = module.probe
            if probe.low.grad is not None:
                _add(self.optimizer.projected, weight, probe.low.grad)
                _add(self._sketches, weight, probe.sketched.grad)
                self._squares.pop(weight, None)
                probe.low.grad = probe.sketched.grad = None

    def _forget(self) -> None:
        self._squares.clear()
        self._sketches.clear()
        for module in self._linears:
            module.probe.low.grad = module.probe.sketched.grad = None


def _add(totals: dict[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
    if key in totals:
        totals[key].add_(value)
    else:
        totals[key] = value
