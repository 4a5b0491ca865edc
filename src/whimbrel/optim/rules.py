"""Update rules: the direction of a step from gradients and moments.

A rule takes lists of fp32 gradients, full or projected onto a subspace, and lists of its moments, which it updates in
place. `t` counts the steps of a parameter, from 1. Callers subtract the returned directions from the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = [
    "MIN_EPS",
    "RULES",
    "Rule",
    "adam_update_",
    "muon_batches",
    "muon_scale",
    "muon_updates",
    "orthogonalize",
]

MIN_EPS = 1e-22
"""Lower bound of eps, so that eps = 0 does not divide 0 by 0: about the square root of the smallest fp32 number."""
MAX_MUON_ELEMENTS = 1 << 28
"""Maximum elements per orthogonalization batch; temporaries take several times their bytes."""
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
"""a, b, c of each step x (a + b x^2 + c x^4), optimal for singular values in [1e-3, 1] (Amsel et al., 2025)."""

Moments = Mapping[str, list[Tensor]]
Update = Callable[[list[Tensor], Moments, Sequence[int], Mapping[str, Any]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Rule:
    """An update rule: its function, its moments with their signs, and the options it reads with their defaults."""

    update: Update
    moments: Mapping[str, Literal["signed", "positive"]]
    defaults: Mapping[str, Any]
    rowwise: bool = True
    """Whether some rows of a matrix can be updated without the others."""
    linear_moment: str | None = None
    """The moment that is linear in the gradients, so that it can be projected to another basis."""

    def moment_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shape of each moment for gradients of `shape`; "rows" and "columns" lack one dimension."""
        factored = {"rows": tuple(shape[:-1]), "columns": (*shape[:-2], *shape[-1:])}
        return {name: factored.get(name, tuple(shape)) for name in self.moments}


def adam_update_(
    grads: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    steps: Sequence[int],
    betas: tuple[float, float],
    eps: float,
    *,
    bias_correction: bool = True,
) -> list[Tensor]:
    """Adam's moments, updated in place; returns the denominators d of the directions m / d.

    m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  d = (1 - b1^t) (sqrt(v / (1 - b2^t)) + eps)
    Without `bias_correction`, d = sqrt(v) + eps and the caller scales by sqrt(1 - b2^t) / (1 - b1^t), as in GaLore.
    """
    beta1, beta2 = betas
    torch._foreach_lerp_(exp_avg, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sq, beta2)
    torch._foreach_addcmul_(exp_avg_sq, grads, grads, 1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sq)
    if bias_correction:
        torch._foreach_div_(denominators, [(1 - beta2**t) ** 0.5 for t in steps])
    torch._foreach_add_(denominators, max(eps, MIN_EPS))
    if bias_correction:
        torch._foreach_mul_(denominators, [1 - beta1**t for t in steps])
    return list(denominators)


def _adamw(grads: list[Tensor], moments: Moments, steps: Sequence[int], options: Mapping[str, Any]) -> list[Tensor]:
    means, squares = moments["exp_avg"], moments["exp_avg_sq"]
    denominators = adam_update_(grads, means, squares, steps, options["betas"], options["eps"])
    return list(torch._foreach_div(means, denominators))


def _sgd(grads: list[Tensor], moments: Moments, steps: Sequence[int], options: Mapping[str, Any]) -> list[Tensor]:
    """After m <- b m + g:  m."""
    torch._foreach_mul_(moments["momentum"], options["momentum"])
    torch._foreach_add_(moments["momentum"], grads)
    return [momentum.clone() for momentum in moments["momentum"]]


def _lion(grads: list[Tensor], moments: Moments, steps: Sequence[int], options: Mapping[str, Any]) -> list[Tensor]:
    """Direction sign(b1 m + (1 - b1) g), then m <- b2 m + (1 - b2) g (Chen et al., 2023)."""
    beta1, beta2 = options["betas"]
    directions = torch._foreach_lerp(moments["momentum"], grads, 1 - beta1)
    torch._foreach_sign_(directions)
    torch._foreach_lerp_(moments["momentum"], grads, 1 - beta2)
    return list(directions)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of (..., m, n): the result has singular values between 0.87 and 1.13.

    An odd polynomial of a matrix applies it to the singular values and keeps the singular vectors, so five quintic
    steps that drive every singular value towards 1 need only matmuls; bf16 is precise enough.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True) * 1.01 + 1e-7).to(x.dtype)
    flat = x.reshape(-1, *x.shape[-2:])
    for a, b, c in POLAR_EXPRESS:
        gram = flat @ flat.mT
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        flat = torch.baddbmm(flat, inner, flat, beta=a)
    factors: Tensor = flat.reshape(x.shape)
    return factors.mT if tall else factors


def muon_batches(shapes: Sequence[torch.Size]) -> list[list[int]]:
    """Batches of indices of matrices with the same shape, at most MAX_MUON_ELEMENTS elements each."""
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, shape in enumerate(shapes):
        by_shape[shape].append(index)
    batches = []
    for shape, indices in by_shape.items():
        count = max(1, MAX_MUON_ELEMENTS // shape.numel())
        batches += [indices[start : start + count] for start in range(0, len(indices), count)]
    return batches


def muon_updates(
    grads: Sequence[Tensor], momenta: Sequence[Tensor], momentum: float, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """(1 - b) g + b m in `dtype`, whose polar factors are the directions; m includes g already."""
    return [update.to(dtype) for update in torch._foreach_lerp(list(grads), list(momenta), momentum)]


def muon_scale(shape: Sequence[int]) -> float:
    """sqrt(max(1, rows / columns)): keeps the RMS of updates of tall matrices as large as for square ones."""
    return float(max(1.0, shape[-2] / shape[-1]) ** 0.5)


def _muon(grads: list[Tensor], moments: Moments, steps: Sequence[int], options: Mapping[str, Any]) -> list[Tensor]:
    """After m <- b m + (1 - b) g:  sqrt(max(1, rows / columns)) polar((1 - b) g + b m) (Jordan et al., 2024)."""
    momenta, momentum = moments["momentum"], options["momentum"]
    torch._foreach_lerp_(momenta, grads, 1 - momentum)
    directions = list(grads)
    for batch in muon_batches([grad.shape for grad in grads]):
        updates = muon_updates([grads[i] for i in batch], [momenta[i] for i in batch], momentum)
        for index, factor in zip(batch, orthogonalize(torch.stack(updates)), strict=True):
            directions[index] = factor * muon_scale(factor.shape)
    return directions


def _adafactor(grads: list[Tensor], moments: Moments, steps: Sequence[int], options: Mapping[str, Any]) -> list[Tensor]:
    """With b = 1 - t^-0.8: v = r c / mean(r), r and c running means of g^2 over columns and rows;  u = g / sqrt(v);
    u / max(1, rms(u)) (Shazeer and Stern, 2018).
    """
    directions = []
    for grad, rows, columns, t in zip(grads, moments["rows"], moments["columns"], steps, strict=True):
        square, weight = grad.square() + 1e-30, t**-0.8
        rows.lerp_(square.mean(dim=-1), weight)
        columns.lerp_(square.mean(dim=-2), weight)
        root = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt()[..., None] * columns.rsqrt()[..., None, :]
        u = grad * root
        directions.append(u / u.square().mean(dim=(-2, -1), keepdim=True).sqrt().clamp(min=1.0))
    return directions


RULES: dict[str, Rule] = {
    "adamw": Rule(
        _adamw,
        {"exp_avg": "signed", "exp_avg_sq": "positive"},
        {"betas": (0.9, 0.999), "eps": 1e-8},
        linear_moment="exp_avg",
    ),
    "sgd": Rule(_sgd, {"momentum": "signed"}, {"momentum": 0.9}, linear_moment="momentum"),
    "lion": Rule(_lion, {"momentum": "signed"}, {"betas": (0.9, 0.99)}, linear_moment="momentum"),
    "muon": Rule(_muon, {"momentum": "signed"}, {"momentum": 0.95}, rowwise=False, linear_moment="momentum"),
    "adafactor": Rule(_adafactor, {"rows": "positive", "columns": "positive"}, {}, rowwise=False),
}
"""Every rule by name; muon and adafactor require matrices."""
