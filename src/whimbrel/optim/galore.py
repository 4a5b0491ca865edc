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
from whimbrel.optim.careful import Careful
from whimbrel.optim.check import check_keys, check_numbers
from whimbrel.optim.projector import Basis, GaLoreProjector, projected_shapes

__all__ = ["GaLore"]


class GaLore(Careful):
    """AdamW in a projected space. A group that has a `rank` projects its tensors of two dimensions or more.

    A tensor of three dimensions is a stack of matrices, each with a basis of its own; one of more (the weight of a
    convolution) is viewed as (out, rest); of fewer than two dimensions it is moved by AdamW as it is.

    State, for each parameter, is tensors alone, there from the start: `step` (on the CPU), `exp_avg` and `exp_avg_sq`
    in the projected shape, in fp32 (fp64 for fp64: second moments stand still in bf16), and the basis in the
    parameter's own dtype: `ortho_matrix`, or `ortho_matrix_left` and `ortho_matrix_right` with projection_type="full".

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
        except OptimizerError:
            self.param_groups.pop()
            raise
        for p in group["params"]:
            if p.requires_grad:
                self.state[p] = _zeros(p, group)

    def _move_all(self) -> None:
        for group in self.param_groups:
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
                        self.state[p][key].copy_(tensor)

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
        state = self.state[p]
        if state["exp_avg"].device != p.device:  # the model went to its device after its optimizer was made
            state.update({key: tensor.to(p.device) for key, tensor in state.items() if key != "step"})
        mean, square, lr, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], float(group["lr"]), group["betas"]
        done = int(state["step"])
        projector = _projector(state, group, done, grad.dtype) if _is_projected(p, group) else None
        if projector is not None:
            grad = projector.project(grad.reshape(_matrices(grad.shape)), done)
            state.update(zip(_basis_keys(group), _parts(projector.ortho_matrix), strict=True))
        grad = grad.to(mean.dtype)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        state["step"] += 1

        root = square.sqrt().add_(group["eps"])
        size = lr * math.sqrt(1 - beta2 ** (done + 1)) / (1 - beta1 ** (done + 1)) * (1 if group["maximize"] else -1)
        if group["weight_decay"]:
            p.mul_(1 - lr * group["weight_decay"])
        if projector is None:
            p.addcdiv_(mean, root, value=size)
        else:
            p.add_(projector.project_back(mean.div(root).to(p.dtype)).view(p.shape), alpha=size)


def _matrices(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix or of a stack of them as it is, that of a convolution as (out, rest)."""
    return shape if len(shape) <= 3 else (shape[0], math.prod(shape[1:]))


def _is_projected(p: Tensor, group: dict[str, Any]) -> bool:
    return group["rank"] is not None and p.ndim > 1


def _zeros(p: Tensor, group: dict[str, Any], device: torch.device | str | None = None) -> dict[str, Tensor]:
    """The state of `p` before its first update, on `device` or where `p` is."""
    device = p.device if device is None else device
    shape: tuple[int, ...] = tuple(p.shape)
    bases: dict[str, tuple[int, ...]] = {}
    if _is_projected(p, group):
        shape, shapes = projected_shapes(group["projection_type"], group["rank"], _matrices(shape))
        bases = dict(zip(_basis_keys(group), shapes, strict=True))
    wide = torch.promote_types(p.dtype, torch.float32)
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    state |= {key: torch.zeros(shape, dtype=wide, device=device) for key in ("exp_avg", "exp_avg_sq")}
    return state | {key: torch.zeros(basis, dtype=p.dtype, device=device) for key, basis in bases.items()}


def _basis_keys(group: dict[str, Any]) -> tuple[str, ...]:
    return ("ortho_matrix_left", "ortho_matrix_right") if group["projection_type"] == "full" else ("ortho_matrix",)


def _parts(basis: Basis | None) -> tuple[Tensor, ...]:
    return () if basis is None else (basis,) if isinstance(basis, Tensor) else basis


def _projector(state: dict[str, Tensor], group: dict[str, Any], done: int, dtype: torch.dtype) -> GaLoreProjector:
    """The projector of a parameter after `done` updates, with the basis of the last of them; none before the first."""
    projector = GaLoreProjector(group["rank"], group["update_proj_gap"], group["scale"], group["projection_type"])
    if done:
        parts = [state[key].to(dtype) for key in _basis_keys(group)]
        projector.ortho_matrix = parts[0] if len(parts) == 1 else (parts[0], parts[1])
    return projector


def _check_state(given: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
    """Refuse a state whose names or shapes are not those that `p` has in `group`."""
    own = {key: tuple(tensor.shape) for key, tensor in _zeros(p, group, "meta").items()}
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
