"""GaLore as published (Zhao et al., 2024): AdamW whose moments live in a low-rank projection of the gradient.

For a matrix W (m x n) with gradient G, at its t-th update, with P = U_r and Q = V_r from the singular vectors of the
gradient at updates 1, gap + 1, 2 gap + 1, ... (for a one-sided projection one of them is the identity):
    R = P^T G Q
    M <- b1 M + (1 - b1) R;   V <- b2 V + (1 - b2) R^2
    N = sqrt(1 - b2^t) / (1 - b1^t)  M / (sqrt(V) + eps)
    W <- (1 - lr wd) W - lr scale P N Q^T
Without a rank, P and Q are identities and scale is 1: AdamW, except that eps is added before the bias correction.

This is the reference that `LowRankOptimizer(subspace="svd")` and other implementations are compared with: SVD in fp64,
two-sided projections, refreshes at fixed steps, and the layout of the published state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from whimbrel.base.errors import OptimizerError
from whimbrel.config import not_one_of
from whimbrel.distributed.sharded_rows import RowSharding, gather_rows, shard_of, sum_rows
from whimbrel.distributed.state import to_local
from whimbrel.optim.base import BaseOptimizer, check_integer, check_numbers, run_eagerly
from whimbrel.optim.rules import adam_update_
from whimbrel.optim.subspace import add_matmul_, singular_vectors, zero_rounding_errors_

__all__ = ["PROJECTION_TYPES", "GaLore", "GaLoreProjector", "matrix_shape", "side_of"]

PROJECTION_TYPES = ("std", "reverse_std", "right", "left", "full")
"""std reduces the shorter side to the rank, reverse_std the longer one; the others name the side."""

Basis: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""V_r^T (r x n) for right, U_r (m x r) for left, or U_r and V_r^T for full."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as a matrix or a stack of matrices; a convolution is (out, rest)."""
    return tuple(shape) if len(shape) <= 3 else (shape[0], math.prod(shape[1:]))


def side_of(projection_type: str, shape: Sequence[int]) -> str:
    """The projected side of a matrix or stack of `shape`: right, left or full."""
    if len(shape) < 2:
        raise OptimizerError(f"expected a tensor of two or more dimensions, got shape {tuple(shape)}")
    tall = shape[-2] >= shape[-1]
    if projection_type == "std":
        return "right" if tall else "left"
    if projection_type == "reverse_std":
        return "left" if tall else "right"
    return projection_type


class GaLoreProjector:
    """Projects the gradients of one parameter, and computes a new basis every `update_proj_gap` steps.

    right:  R = G V_r            back:  G' = R V_r^T
    left:   R = U_r^T G          back:  G' = U_r R
    full:   R = U_r^T G V_r      back:  G' = U_r R V_r^T
    With G = U S V^T truncated to rank r, G' is the best rank-r approximation of G right after a refresh. Each matrix
    of a stack has its own basis. `ortho_matrix` is the only state.
    """

    def __init__(
        self, rank: int = 128, update_proj_gap: int = 50, scale: float = 1.0, projection_type: str = "std"
    ) -> None:
        check_integer("rank", rank, 1)
        check_integer("update_proj_gap", update_proj_gap, 1)
        _check_projection_type(projection_type, PROJECTION_TYPES)
        self.rank = rank
        self.update_proj_gap = update_proj_gap
        self.scale = scale
        self.projection_type = projection_type
        self.ortho_matrix: Basis | None = None

    def project(self, grad: Tensor, steps: int) -> Tensor:
        """The projected gradient; refreshes the basis if there is none or `steps` is a multiple of the gap."""
        return self._project(grad, steps, side_of(self.projection_type, grad.shape))

    def project_back(self, low_rank_grad: Tensor) -> Tensor:
        """Project a low-rank gradient back to full size and multiply it by `scale`."""
        if self.ortho_matrix is None:
            raise OptimizerError("no basis to project back with: call project() first")
        left, right = _split(self.ortho_matrix, self._side_back(low_rank_grad))
        full_rank_grad = low_rank_grad if left is None else left @ low_rank_grad
        full_rank_grad = full_rank_grad if right is None else full_rank_grad @ right
        return full_rank_grad.mul_(self.scale)

    def get_low_rank_grad_std(self, grad: Tensor, steps: int) -> Tensor:
        """Project the shorter side."""
        return self._project(grad, steps, side_of("std", grad.shape))

    def get_low_rank_grad_reverse_std(self, grad: Tensor, steps: int) -> Tensor:
        """Project the longer side."""
        return self._project(grad, steps, side_of("reverse_std", grad.shape))

    def get_low_rank_grad_right(self, grad: Tensor, steps: int) -> Tensor:
        """Project to G V_r."""
        return self._project(grad, steps, "right")

    def get_low_rank_grad_left(self, grad: Tensor, steps: int) -> Tensor:
        """Project to U_r^T G."""
        return self._project(grad, steps, "left")

    def get_low_rank_grad_full(self, grad: Tensor, steps: int) -> Tensor:
        """Project to U_r^T G V_r."""
        return self._project(grad, steps, "full")

    @staticmethod
    def get_orthogonal_matrix(weights: Tensor, rank: int, projection_type: str) -> Basis:
        """The leading singular vectors of `weights`: the first `rank` rows of V^T, columns of U, or both.

        In the dtype and on the device of `weights`, as copies that do not keep all of U or V^T alive. Non-finite
        elements count as zero.

        fp32 is decomposed in fp64. A singular vector is accurate to eps |G| / gap, with `gap` the distance to the next
        singular value; in fp32 a gap of 1% already costs 2e-5 of the best approximation, and 1e-5 costs 3e-2.
        """
        _check_projection_type(projection_type, ("right", "left", "full"))
        svd_dtype = torch.float64 if weights.dtype.itemsize > 2 and weights.device.type != "mps" else torch.float32
        left, right = singular_vectors(weights.detach().to(svd_dtype), rank)

        def compact_copy(part: Tensor) -> Tensor:
            return part.to(weights.dtype, copy=True, memory_format=torch.contiguous_format)

        if projection_type == "full":
            return compact_copy(left), compact_copy(right)
        return compact_copy(left if projection_type == "left" else right)

    def _project(self, grad: Tensor, steps: int, side: str) -> Tensor:
        due = steps % self.update_proj_gap == 0
        if self.ortho_matrix is None or (due and bool(grad.isfinite().all())):
            self.ortho_matrix = self.get_orthogonal_matrix(grad, self.rank, side)
        return _low_rank(grad, *_split(self.ortho_matrix, side))

    def _side_back(self, low_rank_grad: Tensor) -> str:
        """The projected side, inferred from shapes alone: r is at most m and at most n.

        A projection by std is m x r (m >= n >= r) or r x n (r <= m < n), so it is tall exactly if its gradient is. For
        reverse_std the basis is m x r (m >= n >= r) or r x n (r <= m < n), so its shape decides.
        """
        if self.projection_type == "reverse_std" and isinstance(self.ortho_matrix, Tensor):
            return side_of("reverse_std", self.ortho_matrix.shape)
        return side_of(self.projection_type, low_rank_grad.shape)


class GaLore(BaseOptimizer):
    """AdamW in a projected space. A group that has a `rank` projects its tensors of two or more dimensions.

    A tensor of three dimensions is a stack of matrices, each with its own basis; one of more (a convolution) is viewed
    as (out, rest); tensors of fewer than two dimensions are updated by AdamW.

    The state of a parameter, allocated at construction: `step` (on the CPU), `exp_avg` and `exp_avg_sq` in the
    projected shape, in fp32 (fp64 for fp64: second moments in bf16 would stop changing), and the basis in the dtype of
    the parameter: `ortho_matrix`, or `ortho_matrix_left` and `ortho_matrix_right` with projection_type="full". If the
    rows of a parameter are sharded (FSDP2), tensors that have these rows are sharded like it, and the others are
    replicated.
    """

    layout_options = ("rank", "projection_type")
    saved_options = ("rank", "projection_type")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-6,
        *,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        projection_type: str = "std",
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps, "rank": rank,
            "update_proj_gap": update_proj_gap, "scale": scale, "projection_type": projection_type,
            "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults)

    def __str__(self) -> str:
        return type(self).__name__

    def describe(self, parameter: Tensor) -> str:
        """A short label of a parameter for summaries: subspace and rule."""
        basis = [tensor for name, tensor in self.state[parameter].items() if name.startswith("ortho_matrix")]
        return f"svd rank {min(basis[0].shape[-2:])}, adamw" if basis else "adamw"

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_numbers(options)
        _check_projection_type(options["projection_type"], PROJECTION_TYPES)

    def _init_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if not p.is_floating_point():
                raise OptimizerError(f"expected floating-point parameters, got {p.dtype}: exclude this parameter")
        states = {p: _new_state(p, group) for p in group["params"] if p.requires_grad}
        self.state.update(states)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return _new_state(parameter, self._layouts[parameter])

    @run_eagerly
    def _update_all(self) -> None:
        for group in self.param_groups:
            self._check_layout(group)
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._update(p, p.grad, group)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if not self.state[p]:  # it was frozen when its group was added
            self.state[p] = _new_state(p, group)
        if self.state[p]["exp_avg"].device != p.device:  # the model was moved after its optimizer was built
            self.state[p].update({key: t.to(p.device) for key, t in self.state[p].items() if key != "step"})
        state = {key: to_local(tensor) for key, tensor in self.state[p].items()}
        mean, lr, (beta1, beta2) = state["exp_avg"], float(group["lr"]), group["betas"]
        side, weight, left, right = _side(p, group), to_local(p), None, None
        low_rank_grad = to_local(grad)
        if side is not None:
            low_rank_grad, left, right = _project(low_rank_grad, state, side, group, shard_of(p))
        state["step"] += 1
        t = int(state["step"])
        (denominator,) = adam_update_(
            [low_rank_grad.to(mean.dtype)], [mean], [state["exp_avg_sq"]], [t], (beta1, beta2), group["eps"],
            bias_correction=False,
        )  # fmt: skip
        step_size = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) * (1 if group["maximize"] else -1)
        decay = 1 - lr * group["weight_decay"]
        if side is None:
            weight.mul_(decay).addcdiv_(mean, denominator, value=step_size)
            return
        direction = torch.div(mean, denominator, out=denominator)
        if left is not None and right is not None:
            direction = left @ direction.to(left.dtype)
        factors = (direction, right) if right is not None else (left, direction)
        left_factor, right_factor = (factor.to(weight.dtype) for factor in factors if factor is not None)
        add_matmul_(weight, left_factor, right_factor, alpha=step_size * group["scale"], beta=decay)


def _project(
    grad: Tensor, state: dict[str, Tensor], side: str, group: Mapping[str, Any], shard: RowSharding | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The projected gradient, U_r and V_r^T (None for the identity), after a refresh if one is due.

    Under FSDP2 a refresh gathers the gradient. Between refreshes, `right` needs no communication; `left` and `full`
    sum over all rows and so over ranks.
    """
    grad = grad.reshape(matrix_shape(grad.shape))
    keys, step = _basis_keys(group), int(state["step"])
    if step % group["update_proj_gap"] == 0:
        full = gather_rows(grad, shard)
        if step == 0 or bool(full.isfinite().all()):
            basis = GaLoreProjector.get_orthogonal_matrix(full, group["rank"], side)
            for key, part in zip(keys, (basis,) if isinstance(basis, Tensor) else basis, strict=True):
                rows = shard is not None and not shard.stacked and (side == "left" or key == "ortho_matrix_left")
                state[key].copy_(shard.local_part(part, state[key].shape[0]) if shard is not None and rows else part)
    if grad.dtype == torch.float16:  # sums of products of gradients exceed its range
        grad = grad.float()
    parts = [state[key].to(grad.dtype) for key in keys]
    left, right = _split((parts[0], parts[1]) if side == "full" else parts[0], side)
    low_rank_grad = _low_rank(grad, left, right)
    low_rank_grad = low_rank_grad if left is None else sum_rows(low_rank_grad, shard)
    if grad.dtype == state[keys[0]].dtype and grad.dtype.itemsize >= 4:  # a 16-bit basis is only roughly orthonormal
        if right is not None:
            zero_rounding_errors_(low_rank_grad, right.shape[-1])
        if left is not None:
            zero_rounding_errors_(low_rank_grad.mT, left.shape[-2])
    return low_rank_grad, left, right


def _low_rank(grad: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """U_r^T G V_r, where None is the identity."""
    low_rank_grad = grad if left is None else left.mT @ grad
    return low_rank_grad if right is None else low_rank_grad @ right.mT


def _split(basis: Basis, side: str) -> tuple[Tensor | None, Tensor | None]:
    """U_r and V_r^T; None for the side that is not projected."""
    if isinstance(basis, Tensor):
        return (basis, None) if side == "left" else (None, basis)
    return basis


def _side(p: Tensor, group: Mapping[str, Any]) -> str | None:
    """The projected side of a parameter; None if it is not projected."""
    return None if group["rank"] is None or p.ndim < 2 else side_of(group["projection_type"], matrix_shape(p.shape))


def _basis_keys(group: Mapping[str, Any]) -> tuple[str, ...]:
    return ("ortho_matrix_left", "ortho_matrix_right") if group["projection_type"] == "full" else ("ortho_matrix",)


def _new_state(p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state of `p` before its first update: zeros, sharded if they share the rows of `p`."""
    side, keys, shard = _side(p, group), _basis_keys(group), shard_of(p)
    shapes: dict[str, tuple[int, ...]] = {"exp_avg": tuple(p.shape), "exp_avg_sq": tuple(p.shape)}
    sharded: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    if side is not None:
        *stack, rows, columns = matrix_shape(p.shape)
        rank = min(group["rank"], rows, columns)
        left, right = (*stack, rows, rank), (*stack, rank, columns)
        moments, bases = {
            "left": (right, (left,)),
            "right": (left, (right,)),
            "full": ((*stack, rank, rank), (left, right)),
        }[side]
        shapes = {"exp_avg": moments, "exp_avg_sq": moments, **dict(zip(keys, bases, strict=True))}
        if p.ndim == 3:
            sharded = tuple(shapes)
        elif side != "right":
            sharded = keys[:1]
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for key, shape in shapes.items():
        dtype = torch.promote_types(p.dtype, torch.float32) if key.startswith("exp_avg") else p.dtype
        local = shard is not None and key in sharded
        size = (to_local(p).shape[0], *shape[1:]) if local else shape
        tensor = torch.zeros(size, dtype=dtype, device=p.device)
        state[key] = shard.wrap(tensor) if shard is not None and local else tensor
    return state


def _check_projection_type(projection_type: str, allowed: Sequence[str]) -> None:
    if projection_type not in allowed:
        raise OptimizerError(not_one_of("projection_type", projection_type, allowed))
