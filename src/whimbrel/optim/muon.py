"""Muon: momentum whose update is replaced by its polar factor, for hidden matrices; Adam for everything else.

For a matrix W (m x n) with gradient G (Jordan et al., 2024):
    M <- b M + (1 - b) G;   U = (1 - b) G + b M;   W <- (1 - lr wd) W - lr sqrt(max(1, m/n)) polar(U)
Matrices of one shape are stacked and orthogonalised in one batch of products; fused q, k, v are taken apart first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from whimbrel.base.errors import OptimizerError
from whimbrel.ops import kernels_of, orthogonalise
from whimbrel.optim.careful import Careful
from whimbrel.optim.check import check_keys, check_numbers, lr_of
from whimbrel.optim.rules import MIN_EPS
from whimbrel.optim.store import CodedWeight

__all__ = ["Muon"]

AT_ONCE = 1 << 28
"""Numbers that are orthogonalised in one batch, which takes several times their bytes."""


class Muon(Careful):
    """Parameter groups say their `rule`: "muon" (2-D only; optional `splits` of the rows) or "adam"."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        momentum_start: float | None = None,
        momentum_warmup: int = 0,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        rule: str = "muon",
    ) -> None:
        start = momentum if momentum_start is None else momentum_start
        defaults = {
            "lr": lr, "momentum": momentum, "momentum_start": start, "momentum_warmup": momentum_warmup,
            "weight_decay": weight_decay, "betas": betas, "eps": eps, "rule": rule,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take in another group, its settings checked."""
        check_keys("Muon", param_group, self.defaults)
        check_numbers(self.defaults | param_group)
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except OptimizerError:
            self.param_groups.pop()
            raise

    def reset(self) -> None:
        """Forget moments and steps."""
        self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of every optimizer, moments of fp16 parameters in fp32: torch would cast them to fp16."""
        given: dict[str, Any] = {}
        last = self.register_load_state_dict_pre_hook(lambda _, final: given.update(final))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        for own, saved in zip(self.param_groups, given["param_groups"], strict=True):
            for p, index in zip(own["params"], saved["params"], strict=True):
                for name, value in given["state"].get(index, {}).items():
                    if p.dtype == torch.float16 and name != "step":
                        self.state[p][name] = value.to(p.device, torch.float32, copy=True)

    def _move_all(self) -> None:
        for group in self.param_groups:
            (self._step_muon if group["rule"] == "muon" else self._step_adam)(group)

    def _step_muon(self, group: dict[str, Any]) -> None:
        splits = group.get("splits") or [()] * len(group["params"])
        stacks: dict[torch.Size, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
        params = [(p, s) for p, s in zip(group["params"], splits, strict=True) if p.grad is not None and p.numel()]
        if not params:
            return
        for p, _ in params:
            if not self.state[p]:
                self.state[p] = {"step": torch.zeros((), dtype=torch.float32), "momentum": _zeros(p)}
            self.state[p]["step"] += 1
        momentum, lr = _momentum(group, int(self.state[params[0][0]]["step"]) - 1), lr_of(group)
        buffers = [self.state[p]["momentum"] for p, _ in params]
        grads = [p.grad.to(buffer.dtype) for (p, _), buffer in zip(params, buffers, strict=True)]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        torch._foreach_mul_([p for p, _ in params], 1 - lr * group["weight_decay"])
        for (p, rows), grad, buffer in zip(params, grads, buffers, strict=True):
            for piece in zip(*(_split(tensor, rows) for tensor in (p, grad, buffer)), strict=True):
                if piece[0].numel():
                    stacks[piece[0].shape].append(piece)
        dtype = torch.bfloat16 if kernels_of(params[0][0]) == "cuda" else torch.float32
        for shape, pieces in stacks.items():
            scale = -lr * max(1.0, shape[0] / shape[1]) ** 0.5
            count = max(1, AT_ONCE // shape.numel())
            for start in range(0, len(pieces), count):
                weights, own, means = zip(*pieces[start : start + count], strict=True)
                updates = torch._foreach_lerp(own, means, momentum)
                factors = orthogonalise(torch.stack([update.to(dtype) for update in updates]))
                moves = [factor.to(weight.dtype) for weight, factor in zip(weights, factors, strict=True)]
                torch._foreach_add_(weights, moves, alpha=scale)

    def _step_adam(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None and p.numel()]
        if not params:
            return
        for p in params:
            if not self.state[p]:
                step = torch.zeros((), dtype=torch.float32)
                self.state[p] = {"step": step, "exp_avg": _zeros(p), "exp_avg_sq": _zeros(p)}
            if kernels_of(p) == "cuda":  # the fused kernel wants it there, also after a state dict was loaded
                self.state[p]["step"] = self.state[p]["step"].to(p.device)
        states = [self.state[p] for p in params]
        mixed = any(p.dtype == torch.float16 for p in params)  # fused and foreach want moments of the same dtype
        fused = not mixed and all(kernels_of(p) == "cuda" for p in params)
        grads = [cast(Tensor, p.grad).to(s["exp_avg"].dtype) for p, s in zip(params, states, strict=True)]
        adamw(
            params, grads, [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states],
            fused=fused, foreach=False if mixed else None, amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=lr_of(group),
            weight_decay=group["weight_decay"], eps=max(group["eps"], MIN_EPS), maximize=False,
        )  # fmt: skip


def _zeros(p: Tensor) -> Tensor:
    """A moment of `p` before its first update. In fp16, eps would be 0 and squares of gradients below 1e-4 too."""
    return torch.zeros_like(p, dtype=torch.float32 if p.dtype == torch.float16 else p.dtype)


def _momentum(group: dict[str, Any], step: int) -> float:
    """Momentum at `step`, rising linearly over the warm-up."""
    done = min(1.0, step / group["momentum_warmup"]) if group["momentum_warmup"] else 1.0
    return float(group["momentum_start"] + done * (group["momentum"] - group["momentum_start"]))


def _split(matrix: Tensor, rows: tuple[int, ...]) -> tuple[Tensor, ...]:
    return matrix.split(list(rows)) if rows else (matrix,)


def _check(group: dict[str, Any]) -> None:
    if group["rule"] not in ("muon", "adam"):
        raise OptimizerError(f"rule = {group['rule']!r} is not one of muon, adam")
    if group["momentum_warmup"] < 0:
        raise OptimizerError(f"momentum_warmup = {group['momentum_warmup']} must not be negative")
    shapes = [tuple(p.shape) for p in group["params"] if group["rule"] == "muon" and p.ndim != 2]
    if shapes:
        raise OptimizerError(f"muon moves matrices, and one parameter has the shape {shapes[0]}: give it rule='adam'")
    if any(isinstance(p, CodedWeight) for p in group["params"]):
        raise OptimizerError(
            "Muon moves plain weights, and one is stored as codes: use AdamW8bit, GaLoreWarm or another of that family"
        )
