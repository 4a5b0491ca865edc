"""The low-rank optimizer: any combination of a subspace, an update rule, a back projection and low-bit state.

For a weight W (m x n) with gradient G, a basis Q (n x r) and R = G Q, a step is
    N = rule(R);   W <- (1 - lr wd) W - lr scale D,   D = back_project(N, Q, G)
with the moments of the rule in the shape of R. Without `rank`, Q is the identity and the rule is applied to G itself.
A convolution is viewed as (out, rest), a tensor of three dimensions as a stack of matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from whimbrel.base.errors import OptimizerError
from whimbrel.config import did_you_mean, not_one_of
from whimbrel.distributed.sharded_rows import Replicas, RowSharding, grad_times
from whimbrel.optim.base import MAX_GRAD, BaseOptimizer, check_numbers, lr_of, run_eagerly
from whimbrel.optim.param_state import (
    ON_HOST,
    ParamLayout,
    QuantizedParameter,
    State,
    adapt_gaps,
    add_with_stochastic_rounding_,
    is_refresh_due,
    refresh,
    state_codec,
)
from whimbrel.optim.rules import RULES
from whimbrel.optim.subspace import BACK_PROJECTIONS, FullUpdate, add_matmul_, back_project, zero_rounding_errors_

__all__ = [
    "AdamW8bit",
    "Apollo",
    "ApolloMini",
    "Fira",
    "GaLoreWarm",
    "LDAdam",
    "LowRankOptimizer",
    "Options",
    "QGaLore",
]

BATCH_ELEMENTS = 1 << 24
"""Maximum elements updated together; bounds the memory of temporaries."""
CACHE_ELEMENTS = 1 << 18
"""The same for row-wise rules on a CPU, so that temporaries fit in the CPU cache."""


class Options(TypedDict, total=False):
    """Options of a parameter group; as constructor arguments, the defaults for all groups."""

    rank: int | None
    """Rank of the subspace; None: no subspace. Tensors of fewer than two dimensions never have one."""
    subspace: str
    """svd (exact, slow), warm (a power iteration from the last basis) or random (Gaussian from a seed, not stored)."""
    rule: str
    """adamw, sgd, lion, muon or adafactor."""
    back_projection: str
    """How a low-rank direction becomes an update: galore, fira, apollo or apollo_mini (see `subspace.back_project`)."""
    store: str
    """Storage format of the moments: fp32, bf16 or int8."""
    basis_store: str
    """Storage format of the basis: fp32, bf16, int8 or int4."""
    side: str
    """right (project columns, the input side of a linear), left, std (shorter side) or cheapest (least memory)."""
    gap: int
    """Steps between basis refreshes."""
    lazy: bool
    """Adapt the gap: double it while the basis hardly changes, halve it while it changes a lot."""
    moment_transfer: str
    """How moments move to a new basis: first (project the first moment), both (project both), align (rotate the new
    basis toward the old one) or keep (leave them unchanged)."""
    start: str
    """gradient (the first basis is from the first gradient) or random (random until a refresh in the first steps)."""
    scale: float
    """Scale of low-rank updates."""
    betas: tuple[float, float] | None
    eps: float | None
    momentum: float | None
    """Options of the rule; None: its default."""
    weight_decay: float
    error_feedback: bool
    """Whether the part of the gradient outside the subspace is added to the next gradient (LDAdam)."""
    maximize: bool
    foreach: bool
    """Whether parameters are updated in batches."""
    seed: int
    """Seed of random bases and of stochastic rounding."""


DEFAULTS: Options = {
    "rank": None, "subspace": "warm", "rule": "adamw", "back_projection": "galore", "store": "fp32",
    "basis_store": "fp32", "side": "right", "gap": 200, "lazy": False, "moment_transfer": "keep", "start": "gradient",
    "scale": 1.0, "betas": None, "eps": None, "momentum": None, "weight_decay": 0.0, "error_feedback": False,
    "maximize": False, "foreach": True, "seed": 0,
}  # fmt: skip

CHOICES = {
    "subspace": ("svd", "warm", "random"),
    "rule": tuple(RULES),
    "back_projection": BACK_PROJECTIONS,
    "side": ("right", "left", "std", "cheapest"),
    "moment_transfer": ("first", "both", "align", "keep"),
    "start": ("gradient", "random"),
}


class RowChunk(NamedTuple):
    """Some rows of a parameter's matrix (None: all), and their gradient in the subspace."""

    param: ParamLayout
    low_rank_grad: Tensor
    rows: slice | None


class LowRankOptimizer(BaseOptimizer):
    """Any subspace, rule, back projection and storage; see `Options`. Presets are subclasses with other defaults."""

    preset: ClassVar[Options] = {}
    """Defaults of a subclass."""
    layout_options = (
        "rank", "subspace", "rule", "back_projection", "store", "basis_store", "side", "error_feedback",
    )  # fmt: skip
    saved_options = ("rule", "side", "rank")

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Unpack[Options]) -> None:
        for name in options:
            if name not in DEFAULTS:
                raise TypeError(f"{type(self).__name__}: unexpected keyword {name!r}{did_you_mean(name, DEFAULTS)}")
        self._params: dict[Tensor, ParamLayout] = {}
        self._overlaps: list[tuple[ParamLayout, State, Tensor]] = []
        self.projected: dict[Tensor, Tensor] = {}
        """Projected gradients by parameter, filled by `project_in_backward`; a step consumes them."""
        self.replicas: Replicas | None = None
        self.warm_projected: dict[Tensor, Tensor] = {}
        """Projections onto the old basis, averaged over `replicas`, of parameters that are due for a refresh and whose
        gradients are not averaged; filled by `project_in_backward` too."""
        super().__init__(params, {"lr": lr, **DEFAULTS, **self.preset, **options})

    def reset(self) -> None:
        """Restore the state of a new optimizer, in the tensors that exist: other objects may refer to them."""
        self._clear_projected()
        super().reset()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Like the base class, including parameters that have only a projected gradient."""
        loss = super().step(closure)
        self._clear_projected()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.projected, self.warm_projected, self.replicas, self._overlaps = {}, {}, None, []
        self._params = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self._params[parameter] = ParamLayout(parameter, group, len(self._params))

    # Used by `project_in_backward`, summaries and callbacks

    def layout_of(self, parameter: Tensor) -> ParamLayout:
        return self._params[parameter]

    def is_refresh_due(self, parameter: Tensor) -> bool:
        """Whether the next step computes a new basis for a parameter, for which it needs the full gradient."""
        return is_refresh_due(self.state[parameter])

    def is_warm_refresh_due(self, parameter: Tensor) -> bool:
        """Whether the next step computes a new basis from the old one, so that a few products with the gradient do."""
        warm = self._params[parameter].group["subspace"] == "warm" and int(self.state[parameter]["gap"]) > 0
        return warm and self.is_refresh_due(parameter)

    @property
    def can_project(self) -> bool:
        """Whether some parameters can be updated from their projected gradient alone."""
        return any(not self.needs_full_grad(parameter) for parameter in self._params)

    def needs_full_grad(self, parameter: Tensor) -> bool:
        """Whether every update of a parameter needs more than its projected gradient."""
        param = self._params[parameter]
        return param.rank is None or param.group["back_projection"] != "galore" or param.group["error_feedback"]

    def basis(self, parameter: Tensor) -> Tensor:
        """The basis Q of a parameter for the next step, in fp32."""
        param = self._params[parameter]
        return param.basis(self._local_state(param), int(self.state[parameter]["step"]))

    def as_matrix(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """A tensor of a parameter's shape as the matrix whose columns are projected."""
        return self._params[parameter].view(tensor)

    def describe(self, parameter: Tensor) -> str:
        """A short label of a parameter for summaries: subspace, rule and storage."""
        return self._params[parameter].describe()

    def state_bytes(self, parameter: Tensor) -> int:
        """Bytes of the state of a parameter, computed from shapes without allocating it."""
        return self._params[parameter].nbytes()

    # State

    def _init_group(self, group: dict[str, Any]) -> None:
        params = [ParamLayout(p, group, len(self._params) + i) for i, p in enumerate(group["params"])]
        for param in params:
            self._params[param.parameter] = param
            if param.parameter.requires_grad:  # a frozen one gets its state at its first update
                self.state[param.parameter] = param.new_state()

    def _new_state(self, parameter: Tensor) -> State:
        return self._params[parameter].new_state()

    def _state_signature(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}

    def _shards(self) -> list[RowSharding | None]:
        return [param.shard for param in self._params.values()]

    def _local_state(self, param: ParamLayout) -> State:
        state: State = self.state[param.parameter]
        return state if param.shard is None else {name: param.local(tensor) for name, tensor in state.items()}

    @torch.no_grad()
    def _prepare_state(self, param: ParamLayout) -> None:
        """Allocate the state of a parameter that was frozen; move it if the model was moved to another device."""
        parameter = param.parameter
        if not self.state[parameter]:
            self.state[parameter] = param.new_state()
        elif param.device(self.state[parameter]) != parameter.device:
            self.state[parameter] = {
                name: t if name in ON_HOST else t.to(parameter.device) for name, t in self.state[parameter].items()
            }

    # The parts of a step; those called by `step` itself run eagerly under torch.compile

    @run_eagerly
    def _clear_projected(self) -> None:
        self.projected.clear()
        self.warm_projected.clear()

    def _with_grad(self, group: Mapping[str, Any]) -> list[Tensor]:
        """The parameters of a group that have a gradient, full or projected."""
        return [p for p in group["params"] if p.numel() and (p.grad is not None or p in self.projected)]

    @run_eagerly
    def _grads(self) -> list[Tensor]:
        params = [p for group in self.param_groups for p in self._with_grad(group)]
        grads = ((self._params[p], self.projected.get(p, self.warm_projected.get(p, p.grad))) for p in params)
        return [param.local(grad) for param, grad in grads if grad is not None]

    @run_eagerly
    def _update_with_clamped_grads(self) -> None:
        for low_rank_grad in self.projected.values():
            if low_rank_grad.dtype != torch.float16:
                low_rank_grad.clamp_(-MAX_GRAD, MAX_GRAD)
        super()._update_with_clamped_grads()

    @run_eagerly
    def _update_all(self) -> None:
        self._overlaps.clear()
        for group in self.param_groups:
            self._check_layout(group)
            params = [self._params[p] for p in self._with_grad(group)]
            for param in params:
                self._prepare_state(param)
            lr = lr_of(group)
            for batch in self._batches(group, params):
                self._update_batch(batch, lr)
        adapt_gaps(self._overlaps)

    def _batches(self, group: Mapping[str, Any], params: Sequence[ParamLayout]) -> Iterator[list[RowChunk]]:
        """Split a group into batches of bounded size: several parameters, or some rows of a large one."""
        batch: list[RowChunk] = []
        size = 0
        for param in params:
            low_rank_grad = self._project(param)
            for rows in _row_slices(param):
                chunk = RowChunk(param, low_rank_grad[rows] if rows else low_rank_grad, rows)
                full = not group["foreach"] or size + chunk.low_rank_grad.numel() > _batch_elements(param)
                if batch and (full or batch[-1].low_rank_grad.device != low_rank_grad.device):
                    yield batch
                    batch, size = [], 0
                batch.append(chunk)
                size += chunk.low_rank_grad.numel()
        if batch:
            yield batch

    def _project(self, param: ParamLayout) -> Tensor:
        """The gradient in the subspace, after a basis refresh if one is due; increments `step`."""
        parameter, state = param.parameter, self._local_state(param)
        if (low_rank_grad := self.projected.get(parameter)) is not None:
            state["step"] += 1
            if param.is_exact(low_rank_grad):
                zero_rounding_errors_(low_rank_grad, param.shape[-1])
            return low_rank_grad
        assert parameter.grad is not None
        grad = param.view(parameter.grad)
        if param.rank is None:
            state["step"] += 1
            return grad
        if grad.dtype == torch.float16:  # products of gradients exceed its range
            grad = grad.float()
        if "error" in state:
            grad = state["error"].add_(grad)
        averaged = self.warm_projected.get(parameter)
        ranks = param.shard if averaged is None else self.replicas
        if is_refresh_due(state):
            overlap = refresh(param, state, grad, ranks, averaged)
            if overlap is not None:
                self._overlaps.append((param, state, overlap))
        basis = param.basis(state, int(state["step"]))
        state["step"] += 1
        low_rank_grad = grad_times(grad, basis.to(grad.dtype), ranks)
        if param.is_exact(low_rank_grad):
            zero_rounding_errors_(low_rank_grad, param.shape[-1])
        if "error" in state:
            state["error"].sub_(low_rank_grad @ basis.mT)
        return low_rank_grad

    def _update_batch(self, batch: Sequence[RowChunk], lr: float) -> None:
        """Update moments and weights of a batch, all chunks of one rule together."""
        by_rule: dict[str, list[RowChunk]] = defaultdict(list)
        for chunk in batch:
            by_rule[chunk.param.rule_name].append(chunk)
        for name, chunks in by_rule.items():
            states = [self._local_state(chunk.param) for chunk in chunks]
            low_rank_grads = [chunk.low_rank_grad.float() for chunk in chunks]
            moments = {
                moment: [
                    chunk.param.read(state, moment, chunk.rows) for chunk, state in zip(chunks, states, strict=True)
                ]
                for moment in RULES[name].moments
            }
            steps = [int(state["step"]) for state in states]
            directions = RULES[name].update(low_rank_grads, moments, steps, chunks[0].param.options)
            for moment, values in moments.items():
                for chunk, state, value in zip(chunks, states, values, strict=True):
                    noise = chunk.param.noise(state, moment, value.shape, chunk.rows)
                    chunk.param.write(state, moment, value, chunk.rows, noise)
            for chunk, low_rank_grad, direction in zip(chunks, low_rank_grads, directions, strict=True):
                self._update_weight(chunk, low_rank_grad, direction, lr)

    def _update_weight(self, chunk: RowChunk, low_rank_grad: Tensor, direction: Tensor, lr: float) -> None:
        """W <- (1 - lr wd) W - lr scale (A Q^T + c G) for the rows of a chunk.

        fp32 weights take one in-place addmm. Others (16-bit or quantized) need the update in fp32 for stochastic
        rounding, which is computed for some rows at a time.
        """
        param, rows, state = chunk.param, chunk.rows, self._local_state(chunk.param)
        group, weight = param.group, param.view(param.parameter)
        weight = weight[rows] if rows else weight
        quantized, transposed = isinstance(weight, QuantizedParameter), param.scales_along_columns
        rate, decay = -lr if group["maximize"] else lr, lr * group["weight_decay"]
        update, basis, grad = FullUpdate(direction, None), None, None
        if param.rank is not None:
            rate *= group["scale"]
            if "length" in state:
                assert param.parameter.grad is not None
                grad = param.view(param.parameter.grad)
                update = back_project(
                    group["back_projection"], direction, low_rank_grad, grad, state["length"], param.shard
                )
            basis = None if update.low_rank is None else param.basis(state, int(state["step"]) - 1)
        if weight.dtype == torch.float32 and update.low_rank is not None and grad is None and not quantized:
            add_matmul_(weight, update.low_rank, None if basis is None else basis.mT, alpha=-rate, beta=1 - decay)
            return
        generator = param.generator(state, salt=2 + param.first_row(rows))
        stored = weight.mT if transposed else weight  # scales are per stored row, so slice along stored rows
        for part in _weight_slices(stored):
            target = stored[part]
            change = (target.dequantize() if isinstance(target, QuantizedParameter) else target).float() * -decay
            view = change.mT if transposed else change
            row_slice = slice(None) if transposed else part
            if update.low_rank is not None:
                sliced = basis[part] if basis is not None and (transposed or basis.ndim > 2) else basis
                add_matmul_(view, update.low_rank[row_slice], None if sliced is None else sliced.mT, alpha=-rate)
            if update.factor is not None and grad is not None:
                grads = grad[:, part] if transposed else grad[part]
                view.addcmul_(update.factor[row_slice], grads.float(), value=-rate)
            add_with_stochastic_rounding_(target, change, generator)

    # Options

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_numbers(options)
        for name, allowed in CHOICES.items():
            if options[name] not in allowed:
                raise OptimizerError(not_one_of(name, options[name], allowed))
        for name in ("lazy", "error_feedback", "maximize", "foreach"):
            if not isinstance(options[name], bool):
                raise OptimizerError(f"{name}: expected True or False, got {options[name]!r}")
        state_codec(options["store"], "signed")
        state_codec(options["basis_store"], "basis")
        rule = RULES[options["rule"]]
        for name in ("betas", "eps", "momentum"):
            if options[name] is not None and name not in rule.defaults:
                raise OptimizerError(
                    f"{name} = {options[name]} has no effect with rule = {options['rule']!r}: remove it"
                )
        _check_combination(options, linear=rule.linear_moment is not None)


def _check_combination(options: Mapping[str, Any], *, linear: bool) -> None:
    """Raise for options that are mutually exclusive; `linear`: the rule has a moment linear in the gradients."""
    transfer, subspace = options["moment_transfer"], options["subspace"]
    if transfer == "align" and subspace != "warm":
        raise OptimizerError(
            f"moment_transfer = 'align' requires subspace = 'warm', got {subspace!r}: use 'both' or 'keep'"
        )
    if transfer in ("first", "both") and (not linear or subspace == "random"):
        raise OptimizerError(
            f"moment_transfer = {transfer!r} requires a stored basis and a rule with a first moment, got subspace = "
            f"{subspace!r} and rule = {options['rule']!r}: use moment_transfer = 'keep'"
        )
    if options["error_feedback"] and (options["back_projection"] != "galore" or subspace == "random"):
        raise OptimizerError(
            "error_feedback requires back_projection = 'galore' and subspace = 'warm' or 'svd', got "
            f"{options['back_projection']!r} and {subspace!r}"
        )
    for name, default in (("basis_store", "fp32"), ("start", "gradient"), ("lazy", False)):
        if subspace == "random" and options[name] != default:
            raise OptimizerError(f"{name} = {options[name]!r} has no effect with subspace = 'random': remove it")
    if options["back_projection"] == "fira" and subspace == "random":
        raise OptimizerError(
            "back_projection = 'fira' requires an orthonormal basis: use subspace = 'warm' or 'svd', not 'random'"
        )


def _batch_elements(param: ParamLayout) -> int:
    """Maximum number of elements per batch for parameters like this one."""
    # `not is_cuda` is not redundant: a memory prediction makes CPU tensors report is_cuda.
    if param.parameter.device.type == "cpu" and not param.parameter.is_cuda and param.rule.rowwise:
        return min(BATCH_ELEMENTS, CACHE_ELEMENTS)
    return BATCH_ELEMENTS


def _row_slices(param: ParamLayout) -> list[slice | None]:
    """Row slices to update one at a time; [None] means all rows (few rows, or a rule that needs all of them)."""
    limit = _batch_elements(param) if param.rank is None and param.moment_store == "int8" else BATCH_ELEMENTS
    if param.low_rank_shape.numel() <= limit or param.low_rank_shape[0] < 2 or not param.rowwise:
        return [None]
    rows = max(1, limit * param.low_rank_shape[0] // param.low_rank_shape.numel())
    return [slice(start, start + rows) for start in range(0, param.low_rank_shape[0], rows)]


def _weight_slices(weight: Tensor) -> list[slice]:
    """Row slices of a weight, small enough to compute their update in fp32."""
    rows = weight.shape[0] if weight.ndim else 0
    size = max(1, BATCH_ELEMENTS * rows // max(weight.numel(), 1))
    return [slice(start, start + size) for start in range(0, rows, size)]


# Published optimizers as combinations of subspace, rule, back projection and storage. A preset takes the same options
# as LowRankOptimizer. In a group with a rank, tensors of two or more dimensions are updated in the subspace and vectors
# by AdamW; a group with rank=None (embeddings, head) is updated by AdamW. Notation as above; adam(R) is
# m^ / (sqrt(v^) + eps) with moments of R.

ADAM: Options = {"betas": (0.9, 0.999), "eps": 1e-8}


class AdamW8bit(LowRankOptimizer):
    """AdamW with moments in 8 bits and one scale per block of 256 (Dettmers et al., 2021).

    m <- b1 m + (1 - b1) G;  v <- b2 v + (1 - b2) G^2;  W <- (1 - lr wd) W - lr m^ / (sqrt(v^) + eps)
    with m and v dequantized before and quantized after. Levels follow a power law instead of a table; v is rounded
    stochastically, so that changes smaller than one quantization step accumulate.
    """

    preset: ClassVar[Options] = {**ADAM, "store": "int8", "weight_decay": 0.01}


class GaLoreWarm(LowRankOptimizer):
    """GaLore on the input side, with a basis updated by single power iterations. The low-rank optimizer we recommend.

    R = G Q;  W <- (1 - lr wd) W - lr scale adam(R) Q^T
    Every `gap` steps, staggered over matrices:  Q' = orth(G^T R), which needs no SVD. Then the moments are transferred:
    moment_transfer = "first"  M' = M Q^T Q', V unchanged (as in SOAP, Vyas et al., 2024): Q converges to the singular
                               vectors, and V to the variances along them
    moment_transfer = "align"  Q' polar(Q'^T Q) instead of Q': same span, rotated as little as possible; M, V unchanged
    moment_transfer = "both"   M' and V' as in LDAdam
    """

    preset: ClassVar[Options] = {**ADAM, "rank": 128, "subspace": "warm", "gap": 10, "moment_transfer": "first"}


class QGaLore(LowRankOptimizer):
    """Q-GaLore (Zhang et al., 2024): GaLore with 8-bit moments, a 4-bit basis, and fewer refreshes of stable bases.

    Q = first r singular vectors of G, in 4 bits, recomputed after a gap that doubles while they hardly change;
    R = G Q;  W <- (1 - lr wd) W - lr scale adam8bit(R) Q^T, with stochastic rounding of 16-bit weights.
    """

    preset: ClassVar[Options] = {
        **ADAM, "rank": 128, "subspace": "svd", "gap": 200, "lazy": True, "scale": 0.25, "side": "std",
        "store": "int8", "basis_store": "int4",
    }  # fmt: skip


class Apollo(LowRankOptimizer):
    """APOLLO (Zhu et al., 2024): the gradient itself, each channel scaled as Adam would scale it in a random subspace.

    Q_ij ~ N(0, 1/r), sampled from a seed every `gap` steps and not stored;  R = G Q;
    s_i = |adam(R)_i| / |R_i|;  W <- (1 - lr wd) W - lr scale diag(s) G, whose norm grows by at most 1.01 per step.
    """

    preset: ClassVar[Options] = {
        **ADAM, "rank": 128, "subspace": "random", "back_projection": "apollo", "gap": 200, "side": "std",
    }  # fmt: skip


class ApolloMini(LowRankOptimizer):
    """APOLLO-Mini (Zhu et al., 2024): rank 1, and one scale for the whole matrix.

    R = G q, q ~ N(0, 1);  s = |adam(R)| / |R|;  W <- (1 - lr wd) W - lr scale s G, with scale = sqrt(128).
    """

    preset: ClassVar[Options] = {
        **ADAM, "rank": 1, "subspace": "random", "back_projection": "apollo_mini", "gap": 200, "scale": 128**0.5,
        "side": "std",
    }  # fmt: skip


class Fira(LowRankOptimizer):
    """Fira (Chen et al., 2024): GaLore plus the residual of the gradient, scaled as Adam scales the rest.

    Q = first r singular vectors of G;  R = G Q;  phi_i = |adam(R)_i| / |R_i|;
    W <- (1 - lr wd) W - lr scale (adam(R) Q^T + diag(phi) (G - R Q^T)); the last term grows by at most 1.01 per step.
    """

    preset: ClassVar[Options] = {
        **ADAM, "rank": 128, "subspace": "svd", "back_projection": "fira", "gap": 200, "scale": 0.25, "side": "std",
    }  # fmt: skip


class LDAdam(LowRankOptimizer):
    """LDAdam (Robert et al., 2024): a new basis at every step, both moments projected onto it, and error feedback.

    A = G + E;  Q <- one power iteration of A from the last Q;  R = A Q;  C = Q_old^T Q;
    M' = M C;  V' = (1 - b2^t) [max(v^ - m^2, 0) (C o C) + (m^ C)^2];  adam with these moments on R;
    E <- A - R Q^T + b1 / (1 - b1) (M Q_old^T - M' Q^T);  W <- (1 - lr wd) W - lr scale adam(R) Q^T
    The error has the size of the weight: this saves no memory, but no part of the gradient is lost.
    """

    preset: ClassVar[Options] = {
        **ADAM, "rank": 128, "subspace": "warm", "gap": 1, "moment_transfer": "both", "error_feedback": True,
        "side": "std",
    }  # fmt: skip
