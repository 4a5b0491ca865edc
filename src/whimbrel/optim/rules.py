"""From gradients to directions: what each rule remembers, and the direction it takes against which weights move.

A rule sees lists of fp32 gradients, whole or in a subspace, and lists of its own moments, which it changes in place.
`t` is a parameter's count of steps, from 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from whimbrel.ops import orthogonalise

__all__ = ["MIN_EPS", "Moments", "RULES", "Rule"]

MIN_EPS = 1e-22
"""What eps is at least, so that eps = 0 does not divide zero by zero: about the root of the smallest square in fp32."""

Moments = Mapping[str, list[Tensor]]
Update = Callable[[list[Tensor], Moments, Sequence[int], Mapping[str, Any]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: its update, its moments (of one sign or both), the settings it listens to and their defaults."""

    update: Update
    moments: Mapping[str, Literal["signed", "positive"]]
    defaults: Mapping[str, Any]
    row_by_row: bool = True
    """Whether some rows of a matrix can be updated without the others."""
    linear: str | None = None
    """The moment that is linear in the gradients, so that it can be carried into another basis."""

    def shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shape of each moment, for gradients of `shape`; those called rows and columns leave one dimension out."""
        without = {"rows": tuple(shape[:-1]), "columns": (*shape[:-2], *shape[-1:])}
        return {name: without.get(name, tuple(shape)) for name in self.moments}


def _adamw(grads: list[Tensor], moments: Moments, steps: Sequence[int], settings: Mapping[str, Any]) -> list[Tensor]:
    """M <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)."""
    beta1, beta2 = settings["betas"]
    first, second = moments["exp_avg"], moments["exp_avg_sq"]
    torch._foreach_lerp_(first, grads, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
    below = torch._foreach_sqrt(second)
    torch._foreach_div_(below, [(1 - beta2**t) ** 0.5 for t in steps])
    torch._foreach_add_(below, max(settings["eps"], MIN_EPS))
    torch._foreach_mul_(below, [1 - beta1**t for t in steps])
    return list(torch._foreach_div(first, below))


def _sgd(grads: list[Tensor], moments: Moments, steps: Sequence[int], settings: Mapping[str, Any]) -> list[Tensor]:
    """M <- b m + g;  m."""
    torch._foreach_mul_(moments["momentum"], settings["momentum"])
    torch._foreach_add_(moments["momentum"], grads)
    return [momentum.clone() for momentum in moments["momentum"]]


def _lion(grads: list[Tensor], moments: Moments, steps: Sequence[int], settings: Mapping[str, Any]) -> list[Tensor]:
    """sign(b1 m + (1 - b1) g);  m <- b2 m + (1 - b2) g (Chen et al., 2023)."""
    beta1, beta2 = settings["betas"]
    directions = torch._foreach_lerp(moments["momentum"], grads, 1 - beta1)
    torch._foreach_sign_(directions)
    torch._foreach_lerp_(moments["momentum"], grads, 1 - beta2)
    return list(directions)


def _muon(grads: list[Tensor], moments: Moments, steps: Sequence[int], settings: Mapping[str, Any]) -> list[Tensor]:
    """M <- b m + (1 - b) g;  sqrt(max(1, rows / columns)) polar((1 - b) g + b m) (Jordan et al., 2024)."""
    momentum = settings["momentum"]
    torch._foreach_lerp_(moments["momentum"], grads, 1 - momentum)
    directions = list(torch._foreach_lerp(grads, moments["momentum"], momentum))
    alike: dict[torch.Size, list[int]] = defaultdict(list)
    for index, direction in enumerate(directions):
        alike[direction.shape].append(index)
    for shape, indices in alike.items():
        scale = max(1.0, shape[-2] / shape[-1]) ** 0.5
        for index, factor in zip(indices, orthogonalise(torch.stack([directions[i] for i in indices])), strict=True):
            directions[index] = factor * scale
    return directions


def _adafactor(
    grads: list[Tensor], moments: Moments, steps: Sequence[int], settings: Mapping[str, Any]
) -> list[Tensor]:
    """B = 1 - t^-0.8;  v = r c / mean(r), r and c running means of g^2 over columns and rows;  u = g / sqrt(v);
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
        _adamw, {"exp_avg": "signed", "exp_avg_sq": "positive"}, {"betas": (0.9, 0.999), "eps": 1e-8}, linear="exp_avg"
    ),
    "sgd": Rule(_sgd, {"momentum": "signed"}, {"momentum": 0.9}, linear="momentum"),
    "lion": Rule(_lion, {"momentum": "signed"}, {"betas": (0.9, 0.99)}, linear="momentum"),
    "muon": Rule(_muon, {"momentum": "signed"}, {"momentum": 0.95}, row_by_row=False, linear="momentum"),
    "adafactor": Rule(_adafactor, {"rows": "positive", "columns": "positive"}, {}, row_by_row=False),
}
"""Every rule by its name; muon and adafactor are for matrices."""
