"""The base class of our optimizers: checked options, skipped non-finite steps, exact state dicts."""

from __future__ import annotations

import copy
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.utils import get_total_norm

from whimbrel.base.errors import NoSparseGradientError, OptimizerError
from whimbrel.config import did_you_mean
from whimbrel.distributed.sharded_rows import RowSharding, all_ranks_true, copy_, shard_of
from whimbrel.distributed.state import to_local

__all__ = ["MAX_GRAD", "BaseOptimizer", "check_integer", "check_numbers", "lr_of", "run_eagerly"]

logger = logging.getLogger(__name__)

run_eagerly = _disable_dynamo  # torch.compiler.disable, without importing the compiler
"""Run a function, and everything it calls, eagerly under `torch.compile`.

A parameter that is reached by two paths (as a key of `state` and as `ParamLayout.parameter`) is guarded by one of them
only, so code compiled for one parameter would be applied to all others of its shape. Code that looks up tensors by
parameter must not be traced. Little is lost: step counts are read on the host, which breaks the graph at every
parameter.
"""

MAX_GRAD = 1e14
"""Clamp limit for gradient elements whose squares overflow fp32: the sum of a billion such squares is still finite."""

GROUP_METADATA = ("params", "names", "param_names", "peak_lr", "initial_lr", "splits")
"""Group entries that are not optimizer options: written by schedules and by the trainer."""
NUMBER_OPTIONS = (
    "weight_decay", "betas", "eps", "momentum", "momentum_start", "momentum_warmup", "neuron_beta", "scale", "rank",
    "gap", "update_proj_gap", "seed",
)  # fmt: skip
"""Options that must be Python numbers. Only `lr` may be a tensor, as torch's schedulers fill it in place."""
NULLABLE_OPTIONS = ("rank", "betas", "eps", "momentum", "neuron_beta")
"""Options that may be None: no subspace, no normalization, or the default of the update rule."""


class BaseOptimizer(torch.optim.Optimizer):
    """Runs the closure with gradients enabled, rejects sparse gradients, and skips a step with a non-finite gradient.

    Subclasses allocate the state of a group when the group is added (`_init_group`), except those with `lazy_state`.
    """

    skipped: int = 0
    """Steps skipped because of a non-finite gradient; part of the state dict."""
    skip_nonfinite: bool = True
    """Whether such steps are skipped, which syncs with the GPU once per step; False if the caller checks gradients,
    as the trainer does."""

    layout_options: ClassVar[tuple[str, ...]] = ()
    """Group options that determine names and shapes of the state: they must not change once it is allocated."""
    saved_options: ClassVar[tuple[str, ...]] = ()
    """Group options that must be the same in a state dict that is loaded."""
    lazy_state: ClassVar[bool] = False
    """Whether a parameter has no state before its first step."""

    _grads_overflow: bool = False
    """Whether the gradients of this step are finite but their squares exceed fp32."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._layouts: dict[Tensor, dict[str, Any]] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._layouts = {}
        for group in self.param_groups:
            self._record_layout(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the options of a group and allocate its state; a rejected group leaves the optimizer unchanged."""
        for key in param_group:
            if key not in self.defaults and key not in GROUP_METADATA:
                raise OptimizerError(
                    f"unknown option {key!r} in a parameter group of {type(self).__name__}"
                    f"{did_you_mean(key, self.defaults)}"
                )
        self._check_options(self.defaults | param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._init_group(group)
        except OptimizerError:
            self.param_groups.pop()
            raise
        self._record_layout(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; none of them if any gradient is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = self._grads()
        if any(grad.layout is not torch.strided for grad in grads):
            raise NoSparseGradientError(type(self).__name__)
        self._grads_overflow = False
        if self.skip_nonfinite and not self._all_finite(grads):
            self._skip()
        elif self._grads_overflow:
            self._update_with_clamped_grads()
        else:
            self._update_all()
        return loss

    def reset(self) -> None:
        """Reset all state in place, since other objects may hold references to the tensors."""
        self.skipped = 0
        for parameter, state in self.state.items():
            if state:
                for name, tensor in self._new_state(parameter).items():
                    copy_(state[name], tensor)

    def state_dict(self) -> dict[str, Any]:
        """As in torch, plus the number of skipped steps."""
        return super().state_dict() | {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict bit for bit: torch would cast the state to the dtype of its parameter.

        Raises `OptimizerError` for a state that does not fit, before anything has changed.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        expected, got = (
            [len(group["params"]) for group in param_groups] for param_groups in (self.param_groups, groups)
        )
        if expected != got:
            raise OptimizerError(
                f"expected a saved state with groups of {expected} parameters, got {got}: build the optimizer with "
                "the parameter groups it was saved with"
            )
        for group, saved in zip(self.param_groups, groups, strict=True):
            self._check_saved_options(group, saved)
        states: dict[Tensor, dict[str, Any]] = {
            parameter: state_dict["state"].get(key, {})
            for group, saved in zip(self.param_groups, groups, strict=True)
            for parameter, key in zip(group["params"], saved["params"], strict=True)
        }
        for parameter, state in states.items():
            if state or (parameter.requires_grad and not self.lazy_state):
                self._check_saved_state(parameter, state)
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(copy.deepcopy({name: value for name, value in saved.items() if name != "params"}))
            self._record_layout(group)
        for parameter, state in states.items():
            if not state and self.lazy_state:
                self.state.pop(parameter, None)
            if state and not self.state[parameter]:
                self.state[parameter] = self._new_state(parameter)
            for name, value in state.items():
                copy_(self.state[parameter][name], value)
        self.skipped = int(state_dict.get("skipped", 0))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # For subclasses to override

    @abstractmethod
    def _update_all(self) -> None:
        """Update all parameters that have gradients."""

    @abstractmethod
    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first update."""

    @abstractmethod
    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise `OptimizerError` for invalid options of a group."""

    def _init_group(self, group: dict[str, Any]) -> None:
        """Check the parameters of a new group; allocate their state."""

    def _state_signature(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Shapes by name, which must match between a saved state and the state of this optimizer."""
        return {name: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for name, v in state.items()}

    def _shards(self) -> Iterable[RowSharding | None]:
        return [shard_of(p) for group in self.param_groups for p in group["params"]]

    # The parts of a step; those that look up tensors by parameter run eagerly under torch.compile

    def _grads(self) -> list[Tensor]:
        params = (p for group in self.param_groups for p in group["params"])
        return [p.grad for p in params if p.grad is not None and p.numel()]

    @run_eagerly
    def _all_finite(self, grads: list[Tensor]) -> bool:
        """Whether all gradients are finite, on all ranks that share parameters; sets `_grads_overflow`.

        The 2-norm is 20 times faster on a CPU than the maximum norm, but it overflows long before the elements do. The
        maximum norm is computed only if the 2-norm is not finite.
        """
        local = [tensor for tensor in map(to_local, grads) if tensor.numel()]
        norm = get_total_norm(local, 2.0)
        self._grads_overflow = not bool(norm.isfinite())
        finite = (get_total_norm(local, math.inf) if self._grads_overflow else norm).isfinite()
        device = next((p.device for group in self.param_groups for p in group["params"]), finite.device)
        return all_ranks_true(finite.to(device), self._shards())

    @run_eagerly
    def _skip(self) -> None:
        """Count a skipped step; log the 1st, 2nd, 4th, 8th and so on, so that a diverged run does not flood the log."""
        self.skipped += 1
        if self.skipped & (self.skipped - 1) == 0:
            logger.warning(
                "%s skipped a step because a gradient is not finite (%d skipped so far)",
                type(self).__name__, self.skipped,
            )  # fmt: skip

    @run_eagerly
    def _update_with_clamped_grads(self) -> None:
        """Update with clamped copies of the gradients.

        If squares overflowed, second moments would be infinite: their int8 codes would be NaN, and in fp32 the weight
        would never be updated again.
        """
        grads = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        try:
            for p, grad in grads.items():
                if grad.dtype != torch.float16:  # the fp16 maximum is below MAX_GRAD
                    p.grad = grad.clamp(-MAX_GRAD, MAX_GRAD)
            self._update_all()
        finally:
            for p, grad in grads.items():
                p.grad = grad

    # The layout of the state, and saved states

    def _record_layout(self, group: Mapping[str, Any]) -> None:
        layout = {name: group[name] for name in self.layout_options}
        self._layouts |= dict.fromkeys(group["params"], layout)

    def _check_layout(self, group: Mapping[str, Any]) -> None:
        """Raise if options of a group have changed since its state was allocated."""
        for parameter in group["params"]:
            for name, value in self._layouts[parameter].items():
                if group[name] != value:
                    raise OptimizerError(
                        f"expected {name} = {value!r}, for which the state was allocated, got {group[name]!r}: "
                        "create a new optimizer to change it"
                    )

    def _check_saved_options(self, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        for name in self.saved_options:
            if name not in saved:
                raise OptimizerError(f"expected a saved state of {type(self).__name__}, got one without {name!r}")
            if group[name] != saved[name]:
                raise OptimizerError(
                    f"expected a saved state with {name} = {group[name]!r}, got {saved[name]!r}: build the optimizer "
                    "with the options it was saved with"
                )
        self._check_options({**group, **{name: value for name, value in saved.items() if name in group}})

    def _check_saved_state(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        expected = self._state_signature(self.state.get(parameter) or self._new_state(parameter))
        got = self._state_signature(saved)
        name = next(
            (name for name in sorted(expected.keys() | got.keys()) if expected.get(name) != got.get(name)), None
        )
        if name is None:
            return
        problem = f"without {name}, got one with it"
        if name in expected:
            problem = f"with {name} of {expected[name]}, got {got.get(name, 'none')}"
        raise OptimizerError(
            f"parameter of shape {tuple(parameter.shape)}: expected a saved state {problem}: build the optimizer with "
            "the options it was saved with"
        )


def lr_of(group: Mapping[str, Any]) -> float:
    """The learning rate of a group as a number; a tensor is read, never modified."""
    lr = group["lr"]
    return lr.item() if isinstance(lr, Tensor) else lr


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raise `OptimizerError` if an option that is present is out of range."""
    present = {name: value for name, value in options.items() if value is not None or name not in NULLABLE_OPTIONS}
    for name in NUMBER_OPTIONS:
        value = present.get(name)
        if isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value)):
            raise OptimizerError(
                f"{name}: expected a Python number, got a tensor: use .item(), only lr may be a tensor"
            )
    if isinstance(present.get("lr"), Tensor) and present["lr"].numel() != 1:
        raise OptimizerError(
            f"lr: expected a number or a tensor of one element, got shape {tuple(present['lr'].shape)}"
        )
    for name in ("lr", "weight_decay", "eps", "scale"):
        if name in present and not _in_range(present[name], math.inf):
            raise OptimizerError(f"{name}: expected a number >= 0, got {present[name]!r}")
    betas = present.get("betas", (0, 0))
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(_in_range(beta, 1) for beta in betas):
        raise OptimizerError(f"betas: expected two numbers in [0, 1), got {betas!r}")
    for name in ("momentum", "momentum_start", "neuron_beta"):
        if not _in_range(present.get(name, 0), 1):
            raise OptimizerError(f"{name}: expected a number in [0, 1), got {present[name]!r}")
    for name, minimum in (("rank", 1), ("gap", 1), ("update_proj_gap", 1), ("seed", 0)):
        check_integer(name, present.get(name, minimum), minimum)


def check_integer(name: str, value: Any, minimum: int) -> None:
    """Raise `OptimizerError` unless `value` is an integer >= `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise OptimizerError(f"{name}: expected an integer >= {minimum}, got {value!r}")


def _in_range(value: Any, upper: float) -> bool:
    return isinstance(value, Real | Tensor) and 0 <= float(value) < upper
