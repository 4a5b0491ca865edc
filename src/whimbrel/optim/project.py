"""Project in backward: of each gradient only its projection waits for the step, and the gradient itself is freed.

R_acc += G Q, one micro-batch after the other, then one step after the last: exact, since projecting is linear. A matrix
whose basis is due keeps its whole gradient for that step; bases are due for few matrices at a time. With `model`, its
linear layers never make their gradients at all (see `linear`).

The norm of all gradients, for clipping: exact while one micro-batch makes a step and gradients are made at all, as each
is measured before it is freed. Otherwise |G|^2 is estimated as |R|^2 + |G w - R Q^T w|^2 / 16, w being 16 Gaussian
directions: what the basis holds is exact, what it leaves out is right on average, about 1% for a whole model.

Ranks that each hold the whole model average R, not G: m x r numbers travel for a matrix, once a step, and the whole
gradients of those alone whose basis is due or who have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whimbrel.base.errors import OptimizerError
from whimbrel.optim.careful import run_eagerly
from whimbrel.optim.check import check_whole
from whimbrel.optim.composed import Composed
from whimbrel.optim.in_backward import InBackward
from whimbrel.optim.linear import Probe, ProjectedLinear
from whimbrel.optim.refresh import SPREAD, planned
from whimbrel.optim.replicas import are_replicated, average_
from whimbrel.optim.shards import is_shared_out, total

__all__ = ["ProjectInBackward", "project_in_backward"]

DIRECTIONS = 16
"""Of the sketch by which the length of a gradient is estimated."""


def project_in_backward(
    optimizer: Composed,
    *,
    accumulation: int = 1,
    model: nn.Module | None = None,
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ProjectInBackward:
    """Have backward project gradients for `optimizer`; undone by `remove()`.

    `accumulation` is the number of micro-batches that make a step. `model`: its linear layers whose weights move in a
    subspace compute the projection in place of the gradient. `dtype` is that of the projections that wait, by default
    each parameter's own, but fp32 for fp16, whose range sums of gradients exceed. `process_group`: ranks that each hold
    the whole model, over which projections are averaged; nobody else may average gradients, so DDP is used under its
    `no_sync()`.
    """
    return ProjectInBackward(
        optimizer, accumulation=accumulation, model=model, dtype=dtype, process_group=process_group
    )


class ProjectInBackward(InBackward):
    """Stands in for a composed optimizer, whose steps it feeds with projections."""

    optimizer: Composed
    _step_supports_amp_scaling = True
    """So that a `GradScaler` asks for the step, and can be refused: it would not see the projections."""

    def __init__(
        self,
        optimizer: Composed,
        *,
        accumulation: int,
        model: nn.Module | None,
        dtype: torch.dtype | None,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        if not isinstance(optimizer, Composed):
            raise OptimizerError(
                f"{type(optimizer).__name__} does not move in a subspace that gradients can be projected to"
            )
        check_whole("accumulation", accumulation, 1)
        super().__init__(optimizer)
        self.accumulation, self.dtype, self.process_group = accumulation, dtype, process_group
        self._averaged = self._averaged_sketches = False
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
        self._check_ranks(params, model)
        self._linears = {} if model is None else self._take_over(model)
        self._attach(p.register_post_accumulate_grad_hook(self._project) for p in self._lowered)
        self._arm()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step by what was projected, and by whole gradients where there are such."""
        if "grad_scale" in self.__dict__:
            raise OptimizerError("gradients are projected before a GradScaler could unscale them: use bf16, not fp16")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_projected()
        return loss

    @run_eagerly
    def _step_projected(self) -> None:
        self._bring()
        self.optimizer.step()
        self._forget()
        self._arm()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients and projections."""
        self.optimizer.zero_grad(set_to_none)
        self.optimizer.projected.clear()
        self._forget()

    @run_eagerly
    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the step together; exact or estimated, as the head of this file says."""
        self._bring()
        self._average_sketches()
        squares = []
        for p in self._params():
            slot = self.optimizer.slot(p)
            if (low := self.optimizer.projected.get(p)) is not None:
                squares.append((self._squares[p] if p in self._squares else self._estimate(p, low), slot.shard))
            if p.grad is not None:
                squares.append((torch.linalg.vector_norm(slot.here(p.grad), dtype=torch.float32).square(), slot.shard))
        return total(squares).sqrt()

    @run_eagerly
    @torch.no_grad()
    def clip_(self, longest: float, norm: Tensor) -> None:
        """Scale gradients and projections alike."""
        self._bring()
        scale = (longest / (norm + 1e-6)).clamp(max=1.0)
        grads = [self.optimizer.slot(p).here(p.grad) for p in self._params() if p.grad is not None]
        for tensor in (*grads, *self.optimizer.projected.values()):
            tensor.mul_(scale.to(tensor.device, tensor.dtype))

    def reset(self) -> None:
        """Have the optimizer forget moments, steps and bases, and with them what was projected."""
        self.optimizer.reset()
        self._forget()
        self._arm()

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

    @run_eagerly
    @torch.no_grad()
    def _project(self, parameter: Tensor) -> None:
        """The hook: project the gradient of a micro-batch and free it, unless it is wanted whole."""
        self._check_not_late()
        if parameter.grad is None or self.optimizer.refreshes(parameter):
            return
        grad = self.optimizer.matrix(parameter, parameter.grad)
        basis = self.optimizer.basis(parameter)
        grad = grad.float() if grad.dtype == torch.float16 else grad  # products of gradients exceed its range
        low = (grad @ basis.to(grad.dtype)).to(self._dtype_of(parameter))
        if self.accumulation == 1 and parameter in self.optimizer.projected:
            raise OptimizerError(
                f"a parameter of the shape {tuple(parameter.shape)} got a second gradient in one step: give "
                "project_in_backward the accumulation, the micro-batches of a step, or call step() after each backward"
            )
        if self.accumulation == 1 and self.process_group is None:
            self._squares[parameter] = torch.linalg.vector_norm(grad, dtype=torch.float32).square()
        else:
            _add(self._sketches, parameter, grad @ self._sketch(grad.shape[-1], grad.device).to(grad.dtype))
        _add(self.optimizer.projected, parameter, low)
        parameter.grad = None

    def _estimate(self, parameter: Tensor, low: Tensor) -> Tensor:
        """|G|^2 from R and the sketch of G; of a random basis, which is not orthonormal, from the sketch alone."""
        if self.optimizer.slot(parameter).basis_codec is None:
            return self._sketches[parameter].float().square().sum() / DIRECTIONS
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
        if not found:
            raise OptimizerError(
                f"{type(model).__name__} has no nn.Linear whose weight moves in a subspace that is kept: leave model "
                "(train.projected_linears) out, and gradients are projected as they come"
            )
        return found

    def _probe(self, weight: Tensor) -> Probe:
        slot = self.optimizer.slot(weight)
        sketch = self._sketch(slot.shape[-1], weight.device)
        return Probe(slot, slot.stored(self.state[weight], "basis"), sketch, self._dtype_of(weight))

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        """The dtype of the projections of a parameter while they wait."""
        return self.dtype or (torch.float32 if parameter.dtype == torch.float16 else parameter.dtype)

    def make_busiest(self) -> None:
        """Have bases due as in the step, of all that are planned, in which most bytes of gradients are kept whole.

        For predictions: the optimizer is of no use for training afterwards.
        """
        slots = [self.optimizer.slot(p) for p in self._lowered if "due" in self.state[p]]
        if not slots:
            return
        until = SPREAD + 3 * max(slot.group["gap"] for slot in slots)
        kept: Counter[int] = Counter()
        for slot in slots:
            kept.update(dict.fromkeys(planned(slot, until), slot.parameter.nbytes))
        ((busiest, _),) = kept.most_common(1)
        for slot in slots:
            first, *others = planned(slot, until)
            state = self.state[slot.parameter]
            state["gap"].fill_(0 if busiest <= first else slot.group["gap"])
            state["due"].fill_(0 if busiest in (first, *others) else until)
        self._arm()

    def _arm(self) -> None:
        """Before a step: linear layers whose basis is due make their whole gradient in it."""
        for module, weight in self._linears.items():
            module.probe.on = not self.optimizer.refreshes(weight)

    def _collect(self) -> None:
        """Take over what arrived at the probes."""
        for module, weight in self._linears.items():
            probe = module.probe
            if probe.low.grad is not None:
                self._check_not_late()
                _add(self.optimizer.projected, weight, probe.low.grad)
                _add(self._sketches, weight, probe.sketched.grad)
                self._squares.pop(weight, None)
                probe.low.grad = probe.sketched.grad = None

    def _bring(self) -> None:
        """Have all that a step takes: what arrived at the probes, and of several ranks the mean."""
        self._collect()
        if self.process_group is None or self._averaged:
            return
        self._averaged = True
        params = [p for p in self._params() if p.requires_grad]
        projected, low = self.optimizer.projected, {p for p in self._lowered if not self.optimizer.refreshes(p)}
        here = [(projected.get(p) if p in low else p.grad) is not None for p in params]
        for p in [p for p, found in zip(params, here, strict=True) if not found]:
            if p in low:
                shape = self.optimizer.slot(p).low_shape
                projected[p] = torch.zeros(shape, dtype=self._dtype_of(p), device=p.device)
            else:
                p.grad = torch.zeros_like(p)
        means = [projected[p] if p in low else p.grad for p in params]
        anywhere = average_([mean for mean in means if mean is not None], here, self.process_group)
        for p in [p for p, found in zip(params, anywhere, strict=True) if not found]:
            projected.pop(p, None)
            p.grad = None

    def _average_sketches(self) -> None:
        """Over ranks, where the norm is asked for; without sketches, nobody could tell the length of a mean."""
        if self.process_group is None or self._averaged_sketches:
            return
        self._averaged_sketches = True
        params = [p for p in self._params() if p in self.optimizer.projected]
        for p in params:
            empty = torch.zeros(self.optimizer.slot(p).shape[-2], DIRECTIONS, device=p.device)
            self._sketches[p] = self._sketches.get(p, empty).float()
        if params:
            average_([self._sketches[p] for p in params], [True] * len(params), self.process_group)

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _check_ranks(self, params: list[Tensor], model: nn.Module | None) -> None:
        """Refuse ranks that would drift apart, or average twice."""
        shared_out = any(is_shared_out(p) for p in params)
        if shared_out and (model is not None or self.process_group is not None):
            what = "process_group" if model is None else "model"
            raise OptimizerError(f"fully_shard computes and averages gradients in its own way: leave {what} out")
        if self.process_group is None and are_replicated(params):
            raise OptimizerError(
                "gradients are projected before DDP averages them: give process_group = torch.distributed.group.WORLD, "
                "over which projections are averaged, and run backward under the no_sync() of DDP"
            )

    def _check_not_late(self) -> None:
        if self._averaged:
            raise OptimizerError(
                "a gradient came after those of the step were averaged over ranks: ask for the norm, clip and step "
                "after the last micro-batch"
            )

    def _forget(self) -> None:
        self._averaged = self._averaged_sketches = False
        self._squares.clear()
        self._sketches.clear()
        for module in self._linears:
            module.probe.low.grad = module.probe.sketched.grad = None


def _add(totals: dict[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
    if key in totals:
        totals[key].add_(value)
    else:
        totals[key] = value
