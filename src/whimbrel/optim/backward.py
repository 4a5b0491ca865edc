"""Run the optimizer, or its gradient projection, during backward instead of keeping all full gradients.

`step_in_backward` updates each parameter as soon as its gradient is computed and frees the gradient: one exists at a
time, so nothing may depend on all of them together (no accumulation, no clipping).

`project_in_backward` has no such restriction: R_acc += G Q for each micro-batch, then one step after the last; this is
exact, since projecting is linear. A matrix due for a basis refresh keeps its full gradient for that step; refreshes are
staggered, so these are few. With `model`, linear layers never compute their full weight gradients at all (see
`ProjectedLinear`).

The norm of all gradients, for clipping, is exact with one micro-batch per step and without `model`:
each is measured before it is freed. Otherwise |G|^2 is estimated as |R|^2 + |G w - R Q^T w|^2 / 16, w being 16
Gaussian directions: the part inside the basis is exact, the rest is unbiased, with an error of about 1% for a complete
model.

Ranks with replicas of the model average R, not G: m x r numbers per matrix and step, and full gradients only for
parameters that have no basis, or are due for their first one or for one by SVD. A warm refresh needs the mean of G only
in products with a few vectors, so these are averaged instead (`Replicas`): R with the old basis (m x r), G^T R (n x r)
and R with the new basis. The norm is estimated then, in steps with a refresh too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from whimbrel.base.errors import OptimizerError
from whimbrel.distributed.sharded_rows import Replicas, are_replicated, average_, sum_over_ranks
from whimbrel.distributed.state import is_dtensor
from whimbrel.optim.base import check_integer, run_eagerly
from whimbrel.optim.lowrank import LowRankOptimizer
from whimbrel.optim.param_state import FIRST_REFRESH_STEPS, ParamLayout, planned_refreshes

__all__ = [
    "OptimizerInBackward",
    "ProjectInBackward",
    "ProjectedLinear",
    "StepInBackward",
    "project_in_backward",
    "step_in_backward",
]

PER_PARAMETER = ("params", "param_names", "names", "splits")
"""Group entries that are lists with one value per parameter."""
SKETCH_SIZE = 16
"""Random directions from which the norm of a gradient is estimated."""


class OptimizerInBackward(torch.optim.Optimizer):
    """Wraps an optimizer: same groups, same state, interchangeable state dicts."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, OptimizerInBackward) or getattr(optimizer, "runs_in_backward", False):
            raise OptimizerError("the optimizer already runs in backward: call remove() on its wrapper")
        self.optimizer = optimizer
        self.defaults = optimizer.defaults
        self._handles: list[Any] = []
        self._share_state()

    @abstractmethod
    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the step together."""

    @abstractmethod
    def clip_(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients of the step, whose norm is `norm`, so that it is at most `max_norm`."""

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict saved with or without the wrapper."""
        self.optimizer.load_state_dict(state_dict)
        self._share_state()

    def reset(self) -> None:
        """Reset the wrapped optimizer; raises `OptimizerError` if it has no `reset`."""
        if not hasattr(self.optimizer, "reset"):
            raise OptimizerError(f"{type(self.optimizer).__name__} has no reset(): build a new optimizer")
        self.optimizer.reset()

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the wrapped optimizer, such as its hooks."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported: raises `OptimizerError`."""
        raise OptimizerError("cannot add a parameter group to a wrapped optimizer: add it before wrapping")

    def remove(self) -> torch.optim.Optimizer:
        """Remove all hooks; returns the optimizer, to be stepped as usual."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.optimizer.runs_in_backward = False  # type: ignore[attr-defined]
        return self.optimizer

    def _attach(self, handles: Iterable[Any]) -> None:
        """Register hooks; called last in `__init__`, so that a failed constructor leaves none."""
        self._handles += handles
        self.optimizer.runs_in_backward = True  # type: ignore[attr-defined]

    def _share_state(self) -> None:
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


def step_in_backward(optimizer: torch.optim.Optimizer) -> StepInBackward:
    """Step `optimizer` in backward, one parameter at a time; undo with `remove()`."""
    return StepInBackward(optimizer)


class StepInBackward(OptimizerInBackward):
    """Backward updates each parameter and frees its gradient, before all gradients are known."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise OptimizerError(
                "LBFGS updates all parameters together and cannot step in backward: use another optimizer"
            )
        super().__init__(optimizer)
        if are_replicated(p for group in self.param_groups for p in group["params"]):
            raise OptimizerError(
                "step_in_backward would update weights before gradients are averaged over ranks: use "
                "project_in_backward with a process_group, or step after backward"
            )
        self._norms: dict[Tensor, Tensor] = {}
        self._step_started = False
        self._attach(
            parameter.register_post_accumulate_grad_hook(partial(self._update, group_index, index))
            for group_index, group in enumerate(self.param_groups)
            for index, parameter in enumerate(group["params"])
            if parameter.requires_grad
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """End the step; backward has already updated the weights."""
        loss = None if closure is None else closure()
        self._step_started = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """End the step; gradients are freed already."""
        self._step_started = False

    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the last step, each measured before it was freed."""
        norms = [self._norms[p] for group in self.param_groups for p in group["params"] if p in self._norms]
        if not norms:
            return torch.zeros(())
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        return total

    def clip_(self, max_norm: float, norm: Tensor) -> None:
        """Not supported: raises `OptimizerError`."""
        raise OptimizerError(
            "cannot clip gradients after a step in backward: disable clipping, or use project_in_backward"
        )

    @run_eagerly
    def _update(self, group_index: int, index: int, parameter: Tensor) -> None:
        """The gradient hook: step the optimizer with a single group that has only this parameter."""
        group = self.param_groups[group_index]
        if not self._step_started:
            self._norms.clear()
            self._step_started = True
        if parameter in self._norms:
            raise OptimizerError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one step, and "
                "step_in_backward has used the first: disable gradient accumulation, or call step() after each backward"
            )
        if parameter.grad is None:
            return
        self._norms[parameter] = torch.linalg.vector_norm(parameter.grad)
        count = len(group["params"])
        single = {
            name: [value[index]] if name in PER_PARAMETER and isinstance(value, list) and len(value) == count else value
            for name, value in group.items()
        }
        options = {name: value for name, value in single.items() if name != "params"}
        self.optimizer.param_groups = [dict(single)]
        try:
            self.optimizer.step()
            (stepped,) = self.optimizer.param_groups
        finally:
            self.optimizer.param_groups = self.param_groups
        if {name: value for name, value in stepped.items() if name != "params"} != options:
            raise OptimizerError(
                f"{type(self.optimizer).__name__} keeps state per group and cannot step in backward: use AdamW"
            )
        parameter.grad = None


class GradProjection:
    """The basis with which a linear layer projects its weight gradient, and the leaf tensors that receive the result.

    The leaves are tensors of zeros that take no memory; autograd accumulates R and the sketch of G into their `grad`.
    `sketch` holds a few random directions, from which the norm of the part of G outside the basis is estimated.
    """

    def __init__(self, param: ParamLayout, stored: tuple[Tensor, ...], sketch: Tensor, dtype: torch.dtype) -> None:
        assert param.rank is not None
        assert param.basis_codec is not None
        self.stored, self.codec, self.rank, self.sketch = stored, param.basis_codec, param.rank, sketch
        self.transposed = param.transposed
        self.enabled = True
        """False in a step that needs the full gradient."""
        self.low_rank_grad = _empty_leaf(param.low_rank_shape, sketch.device, dtype)
        self.sketched = _empty_leaf((param.shape[-2], sketch.shape[-1]), sketch.device, dtype)

    def basis(self) -> Tensor:
        """The basis and the sketch directions, concatenated along columns."""
        return torch.cat((self.codec.decode(self.stored, self.rank), self.sketch), dim=-1)


class ProjectedLinear(nn.Linear):
    """A linear layer whose weight gradient is never computed, only its projection.

    With Y = X W^T the gradient of W is G = dY^T X, and its projection is
        R = G Q = dY^T (X Q)          (projected columns: forward keeps X Q, r numbers per token, instead of X)
        R = G^T P = X^T (dY P)        (projected rows: forward keeps X)
    either way r/n or r/m of the FLOPs of G, and no weight-sized temporary.
    """

    grad_projection: GradProjection

    def forward(self, x: Tensor) -> Tensor:
        """Like `nn.Linear`; backward adds the projected gradient to `grad_projection`, and `weight.grad` stays None."""
        projection = self.grad_projection
        if not (projection.enabled and torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(x)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y: Tensor = _ProjectedLinearFunction.apply(  # type: ignore[no-untyped-call]
            x.to(dtype),
            self.weight,
            self.bias,
            projection.basis().to(dtype),
            projection.low_rank_grad,
            projection.sketched,
            projection.transposed,
        )
        return y


def _empty_leaf(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A leaf of any shape with the memory of one element."""
    return torch.empty_strided(shape, (0,) * len(shape), device=device, dtype=dtype).requires_grad_()


class _ProjectedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        basis: Tensor,
        low_rank_grad: Tensor,
        sketched: Tensor,
        transposed: bool,
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y = nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
            ctx.save_for_backward(weight, x if transposed else x @ basis, basis if transposed else None)
        ctx.rank, ctx.dtypes = low_rank_grad.shape[-1], (low_rank_grad.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        weight, saved, basis = ctx.saved_tensors
        low_dtype, bias_dtype = ctx.dtypes
        with torch.autocast(grad_y.device.type, enabled=False):
            grad_x = grad_y @ weight.to(grad_y.dtype) if ctx.needs_input_grad[0] else None
            rows, saved = (t.reshape(-1, t.shape[-1]) for t in (grad_y, saved))
            projected = (rows.mT @ saved if basis is None else saved.mT @ (rows @ basis)).to(low_dtype)
            low_rank_grad, sketched = projected[:, : ctx.rank].contiguous(), projected[:, ctx.rank :].contiguous()
            grad_bias = (
                rows.sum(dim=0, dtype=bias_dtype) if bias_dtype is not None and ctx.needs_input_grad[2] else None
            )
        return grad_x, None, grad_bias, None, low_rank_grad, sketched, None


def project_in_backward(
    optimizer: LowRankOptimizer,
    *,
    accumulation: int = 1,
    model: nn.Module | None = None,
    dtype: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ProjectInBackward:
    """Project gradients for `optimizer` in backward; undo with `remove()`.

    `accumulation` is the number of micro-batches per step. `model`: its linear layers whose weights have a subspace
    compute the projection instead of the gradient. `dtype` of the projections until the step; default: that of each
    parameter, but fp32 for fp16, whose range sums of gradients exceed. `process_group`: ranks with replicas of the
    model, over which projections are averaged; nothing else may average gradients, so use DDP under its `no_sync()`.
    """
    return ProjectInBackward(
        optimizer, accumulation=accumulation, model=model, dtype=dtype, process_group=process_group
    )


class ProjectInBackward(OptimizerInBackward):
    """Wraps a low-rank optimizer and feeds its steps with projected gradients."""

    optimizer: LowRankOptimizer
    _step_supports_amp_scaling = True
    """So that a `GradScaler` calls the step and can be rejected: it would not see the projections."""

    def __init__(
        self,
        optimizer: LowRankOptimizer,
        *,
        accumulation: int,
        model: nn.Module | None,
        dtype: torch.dtype | None,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        if not isinstance(optimizer, LowRankOptimizer):
            raise OptimizerError(
                f"project_in_backward: expected a low-rank optimizer such as GaLoreWarm, got {type(optimizer).__name__}"
            )
        check_integer("accumulation", accumulation, 1)
        super().__init__(optimizer)
        self.accumulation, self.dtype, self.process_group = accumulation, dtype, process_group
        self._averaged = self._averaged_sketches = False
        self._squares: dict[Tensor, Tensor] = {}
        self._sketches: dict[Tensor, Tensor] = {}
        self._directions: dict[tuple[int, torch.device], Tensor] = {}
        params = self._all_params()
        self._projected_params = [p for p in params if p.requires_grad and not optimizer.needs_full_grad(p)]
        if not optimizer.can_project:
            raise OptimizerError(
                f"{type(optimizer).__name__} needs the full gradient of every parameter and cannot project in "
                "backward: use galore_warm or qgalore, or step_in_backward"
            )
        self._check_ranks(params, model)
        optimizer.replicas = None if process_group is None else Replicas(process_group)
        self._linears = {} if model is None else self._replace_linears(model)
        self._attach(p.register_post_accumulate_grad_hook(self._project) for p in self._projected_params)
        self._enable_projections()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step with the projected gradients, and with full gradients where there are any."""
        if "grad_scale" in self.__dict__:
            raise OptimizerError(
                "gradients are projected before a GradScaler could unscale them: use bf16 instead of fp16"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_projected()
        return loss

    @run_eagerly
    def _step_projected(self) -> None:
        self._collect_grads()
        self.optimizer.step()
        self._clear()
        self._enable_projections()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients and projections."""
        self.optimizer.zero_grad(set_to_none)
        self.optimizer.projected.clear()
        self.optimizer.warm_projected.clear()
        self._clear()

    @run_eagerly
    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the step together: exact or estimated, see the module docstring."""
        self._collect_grads()
        self._average_sketches()
        squares = []
        for p in self._all_params():
            param = self.optimizer.layout_of(p)
            low_rank_grad = self.optimizer.projected.get(p, self.optimizer.warm_projected.get(p))
            if low_rank_grad is not None:
                squares.append(
                    (self._squares[p] if p in self._squares else self._estimate(p, low_rank_grad), param.shard)
                )
            if p.grad is not None and p not in self.optimizer.warm_projected:
                square = torch.linalg.vector_norm(param.local(p.grad), dtype=torch.float32).square()
                squares.append((square, param.shard))
        return sum_over_ranks(squares).sqrt()

    @run_eagerly
    @torch.no_grad()
    def clip_(self, max_norm: float, norm: Tensor) -> None:
        """Scale gradients and projections alike."""
        self._collect_grads()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        grads = [self.optimizer.layout_of(p).local(p.grad) for p in self._all_params() if p.grad is not None]
        for tensor in (*grads, *self.optimizer.projected.values(), *self.optimizer.warm_projected.values()):
            tensor.mul_(scale.to(tensor.device, tensor.dtype))

    def reset(self) -> None:
        """Reset the optimizer and discard projections."""
        self.optimizer.reset()
        self._clear()
        self._enable_projections()

    def remove(self) -> torch.optim.Optimizer:
        """Remove all hooks and restore the linear layers; returns the optimizer."""
        for module in self._linears:
            module.__class__ = nn.Linear
            del module.grad_projection
        self._linears = {}
        return super().remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict saved with or without the wrapper, including pending basis refreshes."""
        super().load_state_dict(state_dict)
        self._enable_projections()

    def simulate_peak_step(self) -> None:
        """Schedule basis refreshes as in the planned step that keeps the most bytes of full gradients.

        For memory estimates only: the optimizer cannot be used for training afterwards.
        """
        params = [self.optimizer.layout_of(p) for p in self._projected_params if "due" in self.state[p]]
        if not params:
            return
        until = FIRST_REFRESH_STEPS + 3 * max(param.group["gap"] for param in params)
        full_bytes: Counter[int] = Counter()
        for param in params:
            full_bytes.update(dict.fromkeys(planned_refreshes(param, until), param.parameter.nbytes))
        ((peak, _),) = full_bytes.most_common(1)
        for param in params:
            first, *others = planned_refreshes(param, until)
            state = self.state[param.parameter]
            state["gap"].fill_(0 if peak <= first else param.group["gap"])
            state["due"].fill_(0 if peak in (first, *others) else until)
        self._enable_projections()

    @run_eagerly
    @torch.no_grad()
    def _project(self, parameter: Tensor) -> None:
        """The gradient hook: project the gradient of a micro-batch and free it, unless it is needed in full."""
        self._check_not_averaged()
        if parameter.grad is None or self.optimizer.is_refresh_due(parameter):
            return
        grad, low_rank_grad = self._low_rank_grad(parameter, parameter.grad)
        if self.accumulation == 1 and parameter in self.optimizer.projected:
            raise OptimizerError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient in one step: pass the number of "
                "micro-batches as accumulation= to project_in_backward, or call step() after each backward"
            )
        if self.accumulation == 1 and self.process_group is None:
            self._squares[parameter] = torch.linalg.vector_norm(grad, dtype=torch.float32).square()
        else:
            self._add_sketch(parameter, grad)
        _add(self.optimizer.projected, parameter, low_rank_grad)
        parameter.grad = None

    def _low_rank_grad(self, parameter: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """A gradient as a matrix, and its projection."""
        grad, basis = self.optimizer.as_matrix(parameter, grad), self.optimizer.basis(parameter)
        grad = grad.float() if grad.dtype == torch.float16 else grad  # products of gradients exceed its range
        return grad, (grad @ basis.to(grad.dtype)).to(self._projection_dtype(parameter))

    def _add_sketch(self, parameter: Tensor, grad: Tensor) -> None:
        _add(self._sketches, parameter, grad @ self._sketch(grad.shape[-1], grad.device).to(grad.dtype))

    def _estimate(self, parameter: Tensor, low_rank_grad: Tensor) -> Tensor:
        """|G|^2 from R and the sketch of G; for a random basis, which is not orthonormal, from the sketch alone."""
        if self.optimizer.layout_of(parameter).basis_codec is None:
            return self._sketches[parameter].float().square().sum() / SKETCH_SIZE
        basis = self.optimizer.basis(parameter)
        directions = self._sketch(basis.shape[-2], basis.device)
        rest = self._sketches[parameter].float() - low_rank_grad.float() @ (basis.mT @ directions)
        return low_rank_grad.float().square().sum() + rest.square().sum() / SKETCH_SIZE

    def _sketch(self, width: int, device: torch.device) -> Tensor:
        """The Gaussian directions for matrices of `width` columns; always the same."""
        if (width, device) not in self._directions:
            generator = torch.Generator(device).manual_seed(width)
            self._directions[width, device] = torch.randn(width, SKETCH_SIZE, generator=generator, device=device)
        return self._directions[width, device]

    def _replace_linears(self, model: nn.Module) -> dict[Any, Tensor]:
        """Convert linear layers whose weight has a stored basis to `ProjectedLinear`; returns layers and weights."""
        projected = {id(p) for p in self._projected_params}
        replaced: dict[Any, Tensor] = {}
        for module in model.modules():
            if type(module) is not nn.Linear or id(module.weight) not in projected:
                continue
            param = self.optimizer.layout_of(module.weight)
            if param.basis_codec is not None:  # a random basis is not stored
                sketch = self._sketch(param.shape[-1], module.weight.device)
                stored = param.stored(self.state[module.weight], "basis")
                module.__class__ = ProjectedLinear
                dtype = self._projection_dtype(module.weight)
                module.grad_projection = GradProjection(param, stored, sketch, dtype)  # type: ignore[assignment]
                replaced[module] = module.weight
        if not replaced:
            raise OptimizerError(
                f"{type(model).__name__} has no nn.Linear whose weight has a stored basis: omit model= "
                "(train.projected_linears) to project gradients after they are computed"
            )
        return replaced

    def _projection_dtype(self, parameter: Tensor) -> torch.dtype:
        return self.dtype or (torch.float32 if parameter.dtype == torch.float16 else parameter.dtype)

    def _enable_projections(self) -> None:
        """Before a step: let linear layers that are due for a basis refresh compute their full gradient."""
        for module, weight in self._linears.items():
            module.grad_projection.enabled = not self.optimizer.is_refresh_due(weight)

    def _collect_projections(self) -> None:
        """Move the projected gradients from the linear layers to the optimizer."""
        for module, weight in self._linears.items():
            projection = module.grad_projection
            if projection.low_rank_grad.grad is not None:
                self._check_not_averaged()
                _add(self.optimizer.projected, weight, projection.low_rank_grad.grad)
                _add(self._sketches, weight, projection.sketched.grad)
                self._squares.pop(weight, None)
                projection.low_rank_grad.grad = projection.sketched.grad = None

    def _collect_grads(self) -> None:
        """Collect all gradients of the step, including the projections, and average them over ranks."""
        self._collect_projections()
        if self.process_group is None or self._averaged:
            return
        self._averaged = True
        params = [p for p in self._all_params() if p.requires_grad]
        projected, warm_projected = self.optimizer.projected, self.optimizer.warm_projected
        low_rank = {p for p in self._projected_params if not self.optimizer.is_refresh_due(p)}
        present = [(projected.get(p) if p in low_rank else p.grad) is not None for p in params]
        for p in [p for p, is_present in zip(params, present, strict=True) if not is_present]:
            if p in low_rank:
                shape = self.optimizer.layout_of(p).low_rank_shape
                projected[p] = torch.zeros(shape, dtype=self._projection_dtype(p), device=p.device)
            else:
                p.grad = torch.zeros_like(p)
        for p in self._projected_params:
            if p.grad is not None and self.optimizer.is_warm_refresh_due(p):
                grad, warm_projected[p] = self._low_rank_grad(p, p.grad)
                self._add_sketch(p, grad)
        means = [projected.get(p, warm_projected.get(p, p.grad)) for p in params]
        present_on_any_rank = average_([mean for mean in means if mean is not None], present, self.process_group)
        for p in [p for p, is_present in zip(params, present_on_any_rank, strict=True) if not is_present]:
            projected.pop(p, None)
            warm_projected.pop(p, None)
            p.grad = None

    def _average_sketches(self) -> None:
        """Average the sketches over ranks: the norm of a mean cannot be computed from per-rank norms."""
        if self.process_group is None or self._averaged_sketches:
            return
        self._averaged_sketches = True
        params = [p for p in self._all_params() if p in self.optimizer.projected or p in self.optimizer.warm_projected]
        for p in params:
            shape = (*self.optimizer.layout_of(p).shape[:-1], SKETCH_SIZE)
            self._sketches[p] = self._sketches.get(p, torch.zeros(shape, device=p.device)).float()
        if params:
            average_([self._sketches[p] for p in params], [True] * len(params), self.process_group)

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _check_ranks(self, params: list[Tensor], model: nn.Module | None) -> None:
        """Raise if ranks would diverge, or average gradients twice."""
        if any(is_dtensor(p) for p in params) and (model is not None or self.process_group is not None):
            name = "process_group" if model is None else "model"
            raise OptimizerError(f"fully_shard already computes and averages gradients: omit {name}=")
        if self.process_group is None and are_replicated(params):
            raise OptimizerError(
                "gradients are projected before DDP averages them: pass process_group=torch.distributed.group.WORLD, "
                "over which projections are averaged, and run backward under DDP's no_sync()"
            )

    def _check_not_averaged(self) -> None:
        if self._averaged:
            raise OptimizerError(
                "got a gradient after the gradients of this step were averaged over ranks: call grad_norm(), clip_() "
                "and step() after the last micro-batch"
            )

    def _clear(self) -> None:
        self._averaged = self._averaged_sketches = False
        self._squares.clear()
        self._sketches.clear()
        for module in self._linears:
            projection = module.grad_projection
            projection.low_rank_grad.grad = projection.sketched.grad = None


def _add(totals: dict[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
    if key in totals:
        totals[key].add_(value)
    else:
        totals[key] = value
