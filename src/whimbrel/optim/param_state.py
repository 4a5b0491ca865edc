"""Per-parameter state of the low-rank optimizer: matrix view, state layout and storage, basis refreshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from whimbrel.base.errors import OptimizerError
from whimbrel.config import not_one_of
from whimbrel.distributed.sharded_rows import (
    Ranks,
    gather_rows,
    grad_times,
    mean_over_stack,
    randn,
    shard_of,
)
from whimbrel.distributed.state import to_local
from whimbrel.ops.lowbit import BLOCK_SIZE, INT4, INT8, UINT8, FloatCodec, PowerCodec, hash_uniform, stochastic_round
from whimbrel.optim.rules import RULES, Rule
from whimbrel.optim.subspace import (
    Basis,
    cholesky_qr,
    cold_basis,
    random_basis,
    svd_basis,
    warm_basis,
    zero_rounding_errors_,
)

__all__ = [
    "FIRST_REFRESH_STEPS",
    "ON_HOST",
    "ParamLayout",
    "QuantizedParameter",
    "StateCodec",
    "adapt_gaps",
    "add_with_stochastic_rounding_",
    "is_refresh_due",
    "planned_refreshes",
    "refresh",
    "state_codec",
]

ON_HOST = ("step", "due", "gap", "seed")
"""State tensors that control the step; they stay on the CPU, so that reading them does not synchronize."""
StateCodec: TypeAlias = FloatCodec | PowerCodec
State = dict[str, Tensor]
"""On the CPU: step, seed, `due` (step of the next basis refresh), `gap`; on the device: moments, basis, scales etc."""
MIN_LOW_BIT_ELEMENTS = 4096
"""Moments of smaller parameters stay in fp32, where low-bit storage would save only a few bytes."""
GOLDEN_RATIO = 0.6180339887498949
"""Its multiples modulo 1 are spread evenly, however many there are."""

HIGH_OVERLAP, LOW_OVERLAP = 0.9, 0.5
"""Overlaps of successive bases: above the first the gap doubles, below the second it halves."""
MAX_GAP_FACTOR = 8
"""Adapted gaps stay within this factor of the option `gap`."""
FIRST_REFRESH_STEPS = 64
"""Steps over which the first refreshes are spread if bases start at random."""


# Storage


@runtime_checkable
class QuantizedParameter(Protocol):
    """Interface of a tensor subclass that stores a parameter as codes with per-row scales."""

    def dequantize(self) -> Tensor:
        """The weight as a dense tensor."""

    def stochastic_copy_(self, values: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Overwrite the values, with stochastic rounding."""


def state_codec(store: str, kind: Literal["basis", "signed", "positive"]) -> StateCodec:
    """The codec for a basis, or for a signed or non-negative moment, for a value of `store` or `basis_store`."""
    if store in ("fp32", "bf16"):
        return FloatCodec(torch.float32 if store == "fp32" else torch.bfloat16)
    if store == "int4" and kind == "basis":
        return PowerCodec(INT4)
    if store == "int8":
        if kind == "positive":
            return PowerCodec(UINT8, power=4)
        return PowerCodec(INT8, power=1 if kind == "basis" else 2)
    choices = ("fp32", "bf16", "int8", "int4") if kind == "basis" else ("fp32", "bf16", "int8")
    raise OptimizerError(not_one_of("basis_store" if kind == "basis" else "store", store, choices))


def add_with_stochastic_rounding_(weight: Tensor, change: Tensor, generator: torch.Generator) -> None:
    """`weight += change`; quantized and 16-bit weights are rounded stochastically, so that small changes add up."""
    if isinstance(weight, QuantizedParameter):
        weight.stochastic_copy_(weight.dequantize().float().add_(change), generator)
    elif weight.dtype in (torch.bfloat16, torch.float16):
        weight.copy_(stochastic_round(weight.float().add_(change), weight.dtype, generator))
    else:
        weight.add_(change.to(weight.dtype))


# Layout


class ParamLayout:
    """Shapes, codecs and storage of one parameter of a group.

    The state itself is a flat dict of tensors (`State`), allocated completely at construction and owned by the
    optimizer.
    """

    def __init__(self, parameter: Tensor, group: Mapping[str, Any], index: int) -> None:
        if not parameter.is_floating_point():
            raise OptimizerError(f"expected floating-point parameters, got {parameter.dtype}: exclude this parameter")
        self.parameter, self.group, self.index = parameter, group, index
        self.shard = shard_of(parameter)
        projected = group["rank"] is not None and parameter.ndim >= 2
        self.rule_name = group["rule"] if RULES[group["rule"]].rowwise or parameter.ndim >= 2 else "adamw"
        self.as_matrix = projected or not self.rule.rowwise
        self.transposed = False
        local_shape = self.view(parameter).shape
        shape = local_shape if self.shard is None else self.shard.full_shape(local_shape)
        if parameter.ndim > 3 and self.view(parameter).data_ptr() != to_local(parameter).data_ptr():
            raise OptimizerError(
                f"expected a parameter that can be viewed as a matrix, got strides {parameter.stride()} for shape "
                f"{tuple(parameter.shape)}: pass parameter.contiguous()"
            )
        self.rank = min(group["rank"], *shape[-2:]) if projected else None
        self.moment_store = group["store"] if shape.numel() >= MIN_LOW_BIT_ELEMENTS else "fp32"
        self.basis_codec = (
            None if group["subspace"] == "random" or not projected else state_codec(group["basis_store"], "basis")
        )
        if projected:
            self.transposed = self._projects_left(shape)
        self.shape = self.view(parameter).shape
        self.low_rank_shape = self.shape if self.rank is None else torch.Size((*self.shape[:-1], self.rank))
        self.codecs = {name: state_codec(self.moment_store, kind) for name, kind in self.rule.moments.items()}
        self.shapes = self.rule.moment_shapes(self.low_rank_shape)
        if self.basis_codec is not None:
            self.codecs["basis"], self.shapes["basis"] = self.basis_codec, self.basis_shape
        if self.shard is not None and not self.shard.stacked:
            self._check_row_sharding()

    @property
    def rule(self) -> Rule:
        """The update rule; AdamW for vectors if the rule of the group needs matrices."""
        return RULES[self.rule_name]

    @property
    def options(self) -> dict[str, Any]:
        """The options that the rule reads: its defaults, overridden by the group."""
        defaults = self.rule.defaults
        return {**defaults, **{name: self.group[name] for name in defaults if self.group[name] is not None}}

    @property
    def phase(self) -> float:
        """A different number in [0, 1) for each parameter, which staggers refreshes."""
        return self.index * GOLDEN_RATIO % 1

    @property
    def rowwise(self) -> bool:
        """Whether rows can be updated independently; elements of a vector share scales, so it has no rows."""
        independent = self.rank is None or (self.group["back_projection"] == "galore" and len(self.shape) == 2)
        return self.rule.rowwise and len(self.shape) > 1 and independent and not self.scales_along_columns

    @property
    def scales_along_columns(self) -> bool:
        """Whether the parameter is quantized and a row of it, with its scales, is a column of the matrix view."""
        return self.transposed and isinstance(self.local(self.parameter), QuantizedParameter)

    @property
    def basis_shape(self) -> tuple[int, ...]:
        """(..., n, r)."""
        assert self.rank is not None
        return (*self.shape[:-2], self.shape[-1], self.rank)

    def view(self, tensor: Tensor) -> Tensor:
        """The local part of the parameter, or of a tensor like it, as a matrix or stack; its columns are projected."""
        tensor = self.local(tensor).detach()
        if not self.as_matrix:
            return tensor if tensor.ndim else tensor.view(1)
        if tensor.ndim > 3:  # a convolution as (out, rest), in memory order
            strides = self.parameter.stride()
            tensor = tensor.permute(0, *sorted(range(1, tensor.ndim), key=lambda dim: -strides[dim])).flatten(1)
        return tensor.mT if self.transposed else tensor

    def local(self, tensor: Tensor) -> Tensor:
        return tensor if self.shard is None else to_local(tensor)

    def first_row(self, rows: slice | None) -> int:
        """The global index of the first of `rows`; None means all local rows."""
        return (rows.start if rows else 0) + (self.shard.start if self.shard else 0)

    def new_state(self) -> State:
        """The state before the first update: zeros, apart from the seed and, with start="random", basis and `due`.

        For a sharded parameter, tensors with its first dimension are sharded like it: everything but scalars for a
        stack, everything but scalars and the basis for a matrix.
        """
        device = self.parameter.device
        state = {"step": torch.zeros((), dtype=torch.int64)}
        state["seed"] = torch.tensor((self.group["seed"] * 1_000_003 + self.index) % 2**63, dtype=torch.int64)
        for name, shape in self.shapes.items():
            state.update(zip((name, name + "_scale"), self.codecs[name].allocate(shape, device), strict=False))
        if self.basis_codec is not None:
            state |= {"due": torch.zeros((), dtype=torch.int64), "gap": torch.zeros((), dtype=torch.int64)}
            state |= {"failures": torch.zeros(self.shape[:-2], dtype=torch.int32, device=device)}
            if self.group["start"] == "random":
                self._init_random_basis(state)
        if self.rank is not None and self.group["back_projection"] != "galore":
            state["length"] = torch.zeros(self.shape[:-2], device=device)  # `prev_norm` of `back_project`
        if self.rank is not None and self.group["error_feedback"]:
            state["error"] = torch.zeros(self.shape, device=device)
        if (shard := self.shard) is not None:
            sharded = {name for name in state if state[name].ndim and (shard.stacked or not name.startswith("basis"))}
            for name in sharded:
                per_block = len(self.shape) == 1 and name.endswith("_scale")  # a scale of a vector is for a block
                state[name] = shard.wrap(state[name], BLOCK_SIZE if per_block else 1)
        return state

    def nbytes(self) -> int:
        """Bytes that `new_state` would allocate, computed from shapes."""
        total = 8 * 2 + sum(self.codecs[name].nbytes(shape) for name, shape in self.shapes.items())
        stack = self.shape[:-2].numel() if self.as_matrix else 1
        if self.basis_codec is not None:
            total += 8 * 2 + 4 * stack
        if self.rank is not None and self.group["back_projection"] != "galore":
            total += 4 * stack
        if self.rank is not None and self.group["error_feedback"]:
            total += 4 * self.shape.numel()
        return total

    def is_exact(self, low_rank_grad: Tensor) -> bool:
        """Whether `low_rank_grad` is an fp32 matmul with an orthonormal basis, which a low-bit basis is only roughly.

        TF32 matmuls have errors far above those of fp32, so a test for fp32 rounding errors would find none there.
        """
        if self.basis_codec is None or not self.basis_codec.dtype == low_rank_grad.dtype == torch.float32:
            return False
        return not low_rank_grad.is_cuda or torch.get_float32_matmul_precision() == "highest"

    def stored(self, state: State, name: str, rows: slice | None = None) -> tuple[Tensor, ...]:
        """The stored tensors of a moment or of the basis: numbers, or codes and scales."""
        tensors = [state[name]] + ([state[name + "_scale"]] if name + "_scale" in state else [])
        return tuple(tensors if rows is None else [tensor[rows] for tensor in tensors])

    def device(self, state: State) -> torch.device:
        return next(state[name] for name in self.rule.moments).device

    def read(self, state: State, name: str, rows: slice | None = None) -> Tensor:
        """A moment or the basis in fp32. It may or may not share memory with the state: `write` it after a change."""
        codec = self.codecs[name]
        if codec.dtype == torch.float32 and rows is None:
            return state[name]
        return codec.decode(self.stored(state, name, rows), self.shapes[name][-1])

    def write(
        self, state: State, name: str, values: Tensor, rows: slice | None = None, noise: Tensor | None = None
    ) -> None:
        """Store a moment or the basis; rounds to nearest, or stochastically with `noise`."""
        if values is not state[name]:
            self.codecs[name].encode_(self.stored(state, name, rows), values, noise)

    def basis(self, state: State, step: int) -> Tensor:
        """Q in fp32: the stored one, or the random one of `step`, regenerated from its seed."""
        if self.basis_codec is not None:
            return self.read(state, "basis")
        assert self.rank is not None
        generator = self.generator(state, salt=-1, step=step // self.group["gap"])
        return random_basis(self.shape, self.rank, generator, self.parameter.device, self.shard)

    def noise(self, state: State, name: str, shape: torch.Size, rows: slice | None) -> Tensor | None:
        """Noise for stochastic rounding of second moments, which change in steps below the resolution; else None."""
        if self.codecs[name].dtype == torch.float32 or self.rule.moments[name] == "signed":
            return None
        start = self.first_row(rows) * torch.Size(shape[1:]).numel()
        return hash_uniform(shape, self.seed(state, salt=1 << 40) >> 31, start, self.parameter.device)

    def generator(self, state: State, salt: int, step: int | None = None) -> torch.Generator:
        """A generator that depends on the parameter, its step and `salt` only, so that a resumed run reproduces it."""
        return torch.Generator(self.parameter.device).manual_seed(self.seed(state, salt, step))

    def seed(self, state: State, salt: int, step: int | None = None) -> int:
        """63 bits from the parameter, its step and `salt`."""
        step = int(state["step"]) if step is None else step
        seed = int(state["seed"]) * 0x9E3779B97F4A7C15 + step * 0xC2B2AE3D27D4EB4F + salt * 0x165667B19E3779F9
        return seed % 2**63

    def describe(self) -> str:
        """A short label for summaries: subspace, rule and storage."""
        words = (
            [self.rule_name] if self.rank is None else [f"{self.group['subspace']} rank {self.rank}", self.rule_name]
        )
        if self.rank is not None:
            words += [self.group["back_projection"]] if self.group["back_projection"] != "galore" else []
            words += ["left"] if self.transposed else []
            if self.basis_codec is not None and self.group["basis_store"] != "fp32":
                words.append(f"basis {self.group['basis_store']}")
        return ", ".join(words + ([self.moment_store] if self.moment_store != "fp32" else []))

    def _init_random_basis(self, state: State) -> None:
        """Fill in a random orthonormal basis and the step of the first refresh."""
        state["due"].fill_(planned_refreshes(self, 0)[0])
        if not self.parameter.is_meta:
            shard = self.shard if len(self.basis_shape) > 2 else None
            noise = randn(self.basis_shape, self.generator(state, salt=0), self.parameter.device, shard)
            self.write(state, "basis", cholesky_qr(noise)[0])

    def _check_row_sharding(self) -> None:
        """Raise for options that need all rows of a matrix, which are sharded over ranks."""
        shape = tuple(self.parameter.shape)
        if self.transposed:
            raise OptimizerError(
                f"side = {self.group['side']!r} projects the rows of a parameter of shape {shape}, which are sharded: "
                "use side = 'right'"
            )
        if not self.rule.rowwise:
            raise OptimizerError(
                f"rule = {self.rule_name!r} needs all rows of a parameter of shape {shape}, which are sharded: use "
                "rule = 'adamw', 'sgd' or 'lion'"
            )
        assert self.shard is not None
        if self.moment_store == "int8" and len(self.shape) == 1 and self.shard.per_rank % BLOCK_SIZE:
            raise OptimizerError(
                f"store = 'int8' has one scale per {BLOCK_SIZE} numbers: expected vectors sharded in multiples of it, "
                f"got {self.shard.per_rank} of {self.shard.size} per rank: put vectors in a group with store = 'fp32'"
            )

    def _projects_left(self, shape: torch.Size) -> bool:
        """Whether rows, not columns, are projected: the matrix view is transposed then."""
        rows, columns = shape[-2:]
        if self.group["side"] != "cheapest":
            return bool({"right": False, "left": True, "std": rows < columns}[self.group["side"]])
        assert self.rank is not None
        stack = shape[:-2].numel()

        def cost(remaining: int, projected: int) -> int:
            moments = self.rule.moment_shapes((stack, remaining, self.rank or 1))
            kinds = self.rule.moments
            total = sum(state_codec(self.moment_store, kinds[name]).nbytes(size) for name, size in moments.items())
            return total + (self.basis_codec.nbytes((stack, projected, self.rank or 1)) if self.basis_codec else 0)

        return cost(columns, rows) < cost(rows, columns)


# Basis refreshes


def planned_refreshes(param: ParamLayout, until: int) -> list[int]:
    """The steps below `until`, from 0, at which a basis is computed if none fails and gaps are not adapted.

    The first is step 0, or one of the first steps if bases start at random; the second comes half a gap to one and a
    half gaps later. The phase differs between parameters, so that no step has many refreshes.
    """
    gap = param.group["gap"]
    first = int(min(gap, FIRST_REFRESH_STEPS) * param.phase) if param.group["start"] == "random" else 0
    return [first, *range(first + _second_refresh(param), until, gap)]


def _second_refresh(param: ParamLayout) -> int:
    """Steps from the first basis to the second."""
    return max(1, round(param.group["gap"] * (0.5 + param.phase)) if param.group["gap"] > 1 else 1)


def is_refresh_due(state: State) -> bool:
    """Whether the next step computes a new basis, for which it needs the full gradient."""
    return "due" in state and int(state["step"]) >= int(state["due"])


def refresh(
    param: ParamLayout, state: State, grad: Tensor, ranks: Ranks, low_rank_grad: Tensor | None = None
) -> Tensor | None:
    """Compute a new basis and transfer the moments to it; if that fails, keep the old one and retry later.

    `grad` is the part of the gradient that this rank has, and `low_rank_grad` the projection of all of it onto the old
    basis, if it is known.

    Returns the overlap of old and new basis if the gap is to be adapted (see `adapt_gaps`). In a stack, a matrix
    without a new basis (an expert without tokens) does not delay the others. The first basis resets moments, because
    moments accumulated without a basis, or in a random one, are meaningless in it.
    """
    group, first = param.group, int(state["gap"]) == 0
    old = param.read(state, "basis")
    new = _find_basis(param, state, grad, old, ranks, low_rank_grad, first=first)
    state["failures"] += ~new.valid
    if first and not bool(mean_over_stack(new.valid, param.shard)):
        state["due"].copy_(state["step"] + 1)
        return None
    if first:
        state["step"].zero_()
        for name in param.rule.moments:
            param.write(state, name, torch.zeros_like(param.read(state, name)))
        state["gap"].fill_(group["gap"])
        state["due"].fill_(_second_refresh(param))
    else:
        if group["moment_transfer"] in ("first", "both"):
            _transfer_moments(param, state, old, new.basis)
        if not group["lazy"]:
            state["gap"].fill_(group["gap"])  # the option may have changed since the state was saved
        state["due"].copy_(state["step"] + state["gap"])
    param.write(state, "basis", new.basis)
    return mean_over_stack(new.overlap, param.shard) if group["lazy"] and not first else None


def adapt_gaps(overlaps: Sequence[tuple[ParamLayout, State, Tensor]]) -> None:
    """Double the gap where a basis hardly changed, halve it where it changed much; NaN (no new basis) keeps it.

    One device synchronization for all overlaps of a step.
    """
    values = torch.stack([overlap.cpu() for _, _, overlap in overlaps]).tolist() if overlaps else []
    for (param, state, _), overlap in zip(overlaps, values, strict=True):
        base_gap = param.group["gap"]
        max_gap, min_gap = base_gap * MAX_GAP_FACTOR, max(base_gap // MAX_GAP_FACTOR, 1)
        gap = min(int(state["gap"]), max_gap)
        if overlap > HIGH_OVERLAP:
            gap = min(gap * 2, max_gap)
        elif overlap < LOW_OVERLAP:
            gap = max(gap // 2, min_gap)
        state["due"] += gap - state["gap"]
        state["gap"].fill_(gap)


def _find_basis(
    param: ParamLayout,
    state: State,
    grad: Tensor,
    old: Tensor,
    ranks: Ranks,
    low_rank_grad: Tensor | None,
    *,
    first: bool,
) -> Basis:
    assert param.rank is not None
    if param.group["subspace"] == "svd":
        grad = gather_rows(grad, param.shard)
        basis = svd_basis(grad, param.rank)
        valid = grad.abs().amax(dim=(-2, -1)) > 0
        overlap = torch.where(valid, (old.mT @ basis).square().sum(dim=(-2, -1)) / param.rank, torch.nan)
        return Basis(basis if first else torch.where(valid[..., None, None], basis, old), overlap, valid)
    if first:
        return cold_basis(grad, param.rank, param.generator(state, salt=1), ranks)
    if low_rank_grad is None:
        low_rank_grad = grad_times(grad, old.to(grad.dtype), ranks)
    return warm_basis(grad, low_rank_grad, old, align=param.group["moment_transfer"] == "align", ranks=ranks)


def _transfer_moments(param: ParamLayout, state: State, old: Tensor, new: Tensor) -> None:
    """Project the moments from the old basis to the new one: the first, or with moment_transfer="both" both.

    C = Q_old^T Q_new;  M' = M C;  V' = (1 - b2^t) [max(v^ - m^2, 0) (C o C) + (m^ C)^2] with bias-corrected m^ and v^.
    With error feedback, the part of the first moment outside the new basis is added to the error (LDAdam). It is
    orthogonal to that basis, so the projection of the gradient does not change.
    """
    rotation, t = old.mT @ new, int(state["step"])
    assert param.rule.linear_moment is not None
    first = param.read(state, param.rule.linear_moment).clone()
    rotated = first @ rotation
    if param.is_exact(rotated):
        zero_rounding_errors_(rotated, param.shape[-1])
    param.write(state, param.rule.linear_moment, rotated)
    if param.rule_name != "adamw" or t == 0 or param.group["moment_transfer"] == "first":
        return
    beta1, beta2 = param.options["betas"]
    if "error" in state:
        state["error"].add_(first @ old.mT - rotated @ new.mT, alpha=beta1 / (1 - beta1))
    mean = first / (1 - beta1**t)
    variance = (param.read(state, "exp_avg_sq") / (1 - beta2**t) - mean.square()).clamp_(min=0)
    param.write(state, "exp_avg_sq", (variance @ rotation.square() + (mean @ rotation).square()) * (1 - beta2**t))
