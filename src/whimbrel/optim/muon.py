"""Muon: orthogonalized momentum (its polar factor) for hidden matrices; AdamW for everything else.

For a matrix W (m x n) with gradient G (Jordan et al., 2024):
    M <- b M + (1 - b) G;   U = (1 - b) G + b M;   W <- (1 - lr wd) W - lr sqrt(max(1, m/n)) polar(U)
Matrices of the same shape are stacked and orthogonalized in one batch; fused q, k, v are split first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from whimbrel.base.errors import OptimizerError
from whimbrel.optim.base import BaseOptimizer, check_numbers, lr_of
from whimbrel.optim.param_state import QuantizedParameter
from whimbrel.optim.rules import MIN_EPS, muon_batches, muon_directions, muon_scale

__all__ = ["Muon"]


class Muon(BaseOptimizer):
    """A parameter group has a `rule`: "muon" (2-D only, with optional `splits` of rows) or "adam" (torch's AdamW)."""

    lazy_state = True
    layout_options = ("rule",)

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

    def reset(self) -> None:
        """Drop all state."""
        self.skipped = 0
        self.state.clear()

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_numbers(options)
        if options["rule"] not in ("muon", "adam"):
            raise OptimizerError(f"rule: expected muon or adam, got {options['rule']!r}")
        if options["momentum_warmup"] < 0:
            raise OptimizerError(f"momentum_warmup: expected an integer >= 0, got {options['momentum_warmup']}")

    def _init_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if group["rule"] == "muon" and p.ndim != 2:
                raise OptimizerError(
                    f"expected matrices for rule = 'muon', got a parameter of shape {tuple(p.shape)}: use rule = 'adam'"
                )
            if isinstance(p, QuantizedParameter):
                raise OptimizerError(
                    "expected unquantized weights for Muon, got a quantized one: use AdamW8bit, GaLoreWarm or another "
                    "low-rank optimizer"
                )

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return _new_state(parameter, self._layouts[parameter]["rule"])

    def _update_all(self) -> None:
        for group in self.param_groups:
            (self._muon_step if group["rule"] == "muon" else self._adam_step)(group)

    def _muon_step(self, group: dict[str, Any]) -> None:
        splits = group.get("splits") or [()] * len(group["params"])
        params = [(p, s) for p, s in zip(group["params"], splits, strict=True) if p.grad is not None and p.numel()]
        if not params:
            return
        for p, _ in params:
            if not self.state[p]:
                self.state[p] = _new_state(p, group["rule"])
            self.state[p]["step"] += 1
        step, warmup, lr = int(self.state[params[0][0]]["step"]) - 1, group["momentum_warmup"], lr_of(group)
        progress = min(1.0, step / warmup) if warmup else 1.0
        momentum = float(group["momentum_start"] + progress * (group["momentum"] - group["momentum_start"]))
        buffers = [self.state[p]["momentum"] for p, _ in params]
        grads = [p.grad.to(buffer.dtype) for (p, _), buffer in zip(params, buffers, strict=True)]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        torch._foreach_mul_([p for p, _ in params], 1 - lr * group["weight_decay"])
        pieces = [
            piece
            for (p, rows), grad, buffer in zip(params, grads, buffers, strict=True)
            for piece in zip(*(t.split(list(rows)) if rows else (t,) for t in (p, grad, buffer)), strict=True)
            if piece[0].numel()
        ]
        dtype = torch.bfloat16 if params[0][0].is_cuda else torch.float32
        for batch in muon_batches([weight.shape for weight, _, _ in pieces]):
            weights, batch_grads, batch_momenta = zip(*(pieces[i] for i in batch), strict=True)
            factors = muon_directions(batch_grads, batch_momenta, momentum, dtype)
            updates = [factor.to(weight.dtype) for weight, factor in zip(weights, factors, strict=True)]
            torch._foreach_add_(weights, updates, alpha=-lr * muon_scale(weights[0].shape))

    def _adam_step(self, group: dict[str, Any]) -> None:
        """Torch's AdamW, fused on a GPU."""
        params = [p for p in group["params"] if p.grad is not None and p.numel()]
        if not params:
            return
        for p in params:
            if not self.state[p]:
                self.state[p] = _new_state(p, group["rule"])
            if p.is_cuda:  # the fused kernel needs `step` on the GPU, even after load_state_dict
                self.state[p]["step"] = self.state[p]["step"].to(p.device)
        states = [self.state[p] for p in params]
        mixed = any(p.dtype == torch.float16 for p in params)  # fused and foreach need moments of the same dtype
        fused = not mixed and all(p.is_cuda for p in params)
        grads = [cast(Tensor, p.grad).to(s["exp_avg"].dtype) for p, s in zip(params, states, strict=True)]
        adamw(
            params, grads, [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states],
            fused=fused, foreach=False if mixed else None, amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=lr_of(group),
            weight_decay=group["weight_decay"], eps=max(group["eps"], MIN_EPS), maximize=False,
        )  # fmt: skip


def _new_state(p: Tensor, rule: str) -> dict[str, Tensor]:
    dtype = torch.float32 if p.dtype == torch.float16 else p.dtype  # in fp16, eps and squares of gradients may be 0
    names = ("momentum",) if rule == "muon" else ("exp_avg", "exp_avg_sq")
    zeros = {name: torch.zeros_like(p, dtype=dtype) for name in names}
    return {"step": torch.zeros((), dtype=torch.float32), **zeros}
