"""GaLore: AdamW whose moments live in a low-rank projection of the gradient (Zhao et al., 2024), the reference.

For a matrix W (m x n) with gradient G, at the t-th update of it (P and Q from the singular vectors of a gradient, taken
anew at the updates 1, gap + 1, 2 gap + 1, ...; of a one-sided projection one of them is the identity):
    R = P^T G Q
    M <- b1 M + (1 - b1) R;   V <- b2 V + (1 - b2) R^2
    N = sqrt(1 - b2^t) / (1 - b1^t)  M / (sqrt(V) + eps)
    W <- (1 - lr wd) W - lr scale P N Q^T
Without a rank, P and Q are identities and scale is 1: AdamW, but for eps, which is added before the bias correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from whimbrel.base.errors import OptimizerError
from whimbrel.optim.careful import Careful, run_eagerly
from whimbrel.optim.check import check_keys, check_numbers
from whimbrel.optim.projector import GaLoreProjector, low_rank, matrix_shape, projected_shapes, side_of
from whimbrel.optim.rules import MIN_EPS
from whimbrel.optim.shards import Shard, add_up, copy_, gather, local, shard_of
from whimbrel.optim.subspace import drop_rounding_

__all__ = ["GaLore"]


class GaLore(Careful):
    """AdamW in a projected space. A group that has a `rank` projects its tensors of two dimensions or more.

    A tensor of three dimensions is a stack of matrices, each with a basis of its own; one of more (the weight of a
    convolution) is viewed as (out, rest); of fewer than two dimensions it is moved by AdamW as it is.

    State, for each parameter, is tensors alone, there from the start: `step` (on the CPU), `exp_avg` and `exp_avg_sq`
    in the projected shape, in fp32 (fp64 for fp64: second moments stand still in bf16), and the basis in the
    parameter's own dtype: `ortho_matrix`, or `ortho_matrix_left` and `ortho_matrix_right` with projection_type="full".
    Of a parameter whose rows are sharded (FSDP2), what has these rows is sharded like it, and all else is the same on
    every rank.

    A step in which any gradient is not finite is skipped as a whole, and counted in `skipped`.
    """

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Remember what the state of each group was allocated for, also in a copy."""
        super().__setstate__(state)
        self._allocated = {p: _layout(group) for group in self.param_groups for p in group["params"]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take in another group, its settings checked and its state allocated."""
        check_keys("GaLore", param_group, self.defaults)
        _check_settings(self.defaults | param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for p in group["params"]:
                if not p.is_floating_point():
                    raise OptimizerError(f"GaLore moves real parameters, and one is of {p.dtype}: leave it out")
            states = {p: _zeros(p, group) for p in group["params"] if p.requires_grad}
        except OptimizerError:
            self.param_groups.pop()
            raise
        self.state.update(states)
        self._allocated = {p: _layout(group) for group in self.param_groups for p in group["params"]}

    @run_eagerly
    def _move_all(self) -> None:
        for group in self.param_groups:  # those of one parameter alone, where backward steps
            now = _layout(group)
            for allocated in {self._allocated[p] for p in group["params"]} - {now}:
                raise OptimizerError(
                    f"the state of a parameter group was allocated for {allocated}, and the group now has {now}: make "
                    "a new optimizer to change it"
                )
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._move(p, p.grad, group)

    def reset(self) -> None:
        """Forget all: moments, steps and bases are zero, and the next update takes new bases."""
        for state in self.state.values():
            for tensor in state.values():
                tensor.zero_()
        self.skipped = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state, the state checked and exact: torch would round it to the parameter's dtype.

        Hooks of others run before and after, on the whole. What does not fit is refused, and nothing has changed.
        """
        state: dict[Tensor, dict[str, Tensor]] = {}
        settings = self.defaults.keys() - {"differentiable"}  # which torch adds

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            for own, group in zip(self.param_groups, given["param_groups"], strict=False):
                if lacking := sorted(settings - group.keys()):
                    raise OptimizerError(
                        f"the state is of another optimizer than GaLore: no {', '.join(lacking)} in it"
                    )
                _check_settings(group)
                if _layout(group) != _layout(own):
                    raise OptimizerError(
                        f"expected a state of {_layout(own)}, got one of {_layout(group)}: make the optimizer with the "
                        "settings of the saved one"
                    )
                for p, index in zip(own["params"], group["params"], strict=False):
                    if index in given["state"]:
                        _check_state(given["state"][index], p, group)
                        state[p] = given["state"][index]
            return given | {"state": {}}

        def put(_: torch.optim.Optimizer) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p in state or p.requires_grad:
                        self.state[p] = _zeros(p, group)
                    for key, tensor in state.get(p, {}).items():
                        copy_(self.state[p][key], tensor)

        last = self.register_load_state_dict_pre_hook(take)
        first = self.register_load_state_dict_post_hook(put, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
            first.remove()

    def _move(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if not self.state[p]:  # it was frozen when its group came
            self.state[p] = _zeros(p, group)
        if self.state[p]["exp_avg"].device != p.device:  # the model went to its device after its optimizer was made
            self.state[p].update({key: t.to(p.device) for key, t in self.state[p].items() if key != "step"})
        state = {key: local(tensor) for key, tensor in self.state[p].items()}
        mean, square, lr, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], float(group["lr"]), group["betas"]
        done, side, weight = int(state["step"]), _side(p, group), local(p)
        low, left, right = local(grad), None, None
        if side is not None:
            low, left, right = _project(low, state, done, side, group, shard_of(p))
        low = low.to(mean.dtype)
        mean.lerp_(low, 1 - beta1)
        square.mul_(beta2).addcmul_(low, low, value=1 - beta2)
        state["step"] += 1

        root = square.sqrt().add_(max(group["eps"], MIN_EPS))
        size = lr * math.sqrt(1 - beta2 ** (done + 1)) / (1 - beta1 ** (done + 1)) * (1 if group["maximize"] else -1)
        keep = 1 - lr * group["weight_decay"]
        if side is None:
            weight.mul_(keep).addcdiv_(mean, root, value=size)
        else:
            _add_back_(weight, torch.div(mean, root, out=root), left, right, keep, size * group["scale"])


def _layout(group: dict[str, Any]) -> str:
    """The settings that the names and shapes of a state depend on."""
    return f"rank = {group['rank']}, projection_type = {group['projection_type']!r}"


def _side(p: Tensor, group: dict[str, Any]) -> str | None:
    """The side that a parameter is projected from; None where it is not projected."""
    return None if group["rank"] is None or p.ndim < 2 else side_of(group["projection_type"], matrix_shape(p.shape))


def _project(
    grad: Tensor, state: dict[str, Tensor], done: int, side: str, group: dict[str, Any], shard: Shard | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradient in the subspace, and U_r and V_r^T, None for the identity; after a refresh where one is due.

    A refresh under FSDP2 gathers the gradient. Between two of them, `right` needs nothing of other ranks; `left` and
    `full` sum over all rows, so over ranks.
    """
    grad = grad.reshape(matrix_shape(grad.shape))
    keys = _basis_keys(group)
    if done % group["update_proj_gap"] == 0:
        whole = gather(grad, shard)
        if done == 0 or bool(whole.isfinite().all()):
            basis = GaLoreProjector.get_orthogonal_matrix(whole, group["rank"], side)
            for key, part in zip(keys, (basis,) if isinstance(basis, Tensor) else basis, strict=True):
                rows = shard is not None and not shard.stacked and (side == "left" or key == "ortho_matrix_left")
                state[key].copy_(shard.take(part, state[key].shape[0]) if shard is not None and rows else part)
    if grad.dtype == torch.float16:  # sums of products of gradients exceed its range
        grad = grad.float()
    parts = [state[key].to(grad.dtype) for key in keys]
    left, right = (parts[0], parts[1]) if side == "full" else (parts[0], None) if side == "left" else (None, parts[0])
    low = low_rank(grad, left, right)
    low = low if left is None else add_up(low, shard)
    if (
        grad.dtype == state[keys[0]].dtype and grad.dtype.itemsize >= 4
    ):  # a basis in 16 bits is orthonormal only roughly
        if right is not None:
            drop_rounding_(low, right.shape[-1])
        if left is not None:
            drop_rounding_(low.mT, left.shape[-2])
    return low, left, right


def _add_back_(
    weight: Tensor, low: Tensor, left: Tensor | None, right: Tensor | None, keep: float, size: float
) -> None:
    """`weight = keep * weight + size * U_r low V_r^T`, without another matrix of that size where memory allows."""
    one, other = (low, right) if left is None else (left, low)
    if left is not None and right is not None:
        one, other = left @ low.to(left.dtype), right
    assert other is not None
    one, other = one.to(weight.dtype), other.to(weight.dtype)
    if weight.ndim == 3:
        weight.baddbmm_(one, other, beta=keep, alpha=size)
    elif weight.ndim == 2:
        weight.addmm_(one, other, beta=keep, alpha=size)
    else:  # a convolution may be in channels_last, whose memory is not laid out as a matrix
        weight.mul_(keep).add_((one @ other).view(weight.shape), alpha=size)


def _shapes(p: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The whole shape of each tensor of the state of `p`."""
    shape: tuple[int, ...] = tuple(p.shape)
    bases: dict[str, tuple[int, ...]] = {}
    if _side(p, group) is not None:
        shape, parts = projected_shapes(group["projection_type"], group["rank"], matrix_shape(shape))
        bases = dict(zip(_basis_keys(group), parts, strict=True))
    return {"step": (), "exp_avg": shape, "exp_avg_sq": shape} | bases


def _sharded(p: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
    """The tensors of the state of `p` that have its first dimension."""
    side, basis = _side(p, group), _basis_keys(group)
    if p.ndim == 3:
        return ("exp_avg", "exp_avg_sq", *(basis if side else ()))
    return ("exp_avg", "exp_avg_sq") if side in (None, "right") else basis[:1]


def _zeros(p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """The state of `p` before its first update, where `p` is."""
    wide, shard = torch.promote_types(p.dtype, torch.float32), shard_of(p)
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    for key, shape in _shapes(p, group).items():
        if key == "step":
            continue
        dtype, rows = wide if key.startswith("exp_avg") else p.dtype, shard is not None and key in _sharded(p, group)
        size = (local(p).shape[0], *shape[1:]) if rows else shape
        tensor = torch.zeros(size, dtype=dtype, device=p.device)
        state[key] = shard.wrap(tensor) if shard is not None and rows else tensor
    return state


def _basis_keys(group: dict[str, Any]) -> tuple[str, ...]:
    return ("ortho_matrix_left", "ortho_matrix_right") if group["projection_type"] == "full" else ("ortho_matrix",)


def _check_state(given: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
    """Refuse a state whose names or shapes are not those that `p` has in `group`."""
    own = _shapes(p, group)
    saved = {key: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for key, v in given.items()}
    if saved != own:
        raise OptimizerError(
            f"the state for a parameter of the shape {tuple(p.shape)} has {saved}, and it needs {own}: load a state of "
            "the same parameters, rank and projection_type"
        )


def _check_settings(group: dict[str, Any]) -> None:
    """Refuse values that cannot be meant, of a setting that is given or loaded."""
    check_numbers(group)
    rank = 1 if group["rank"] is None else group["rank"]
    GaLoreProjector(rank, group["update_proj_gap"], group["scale"], group["projection_type"])
