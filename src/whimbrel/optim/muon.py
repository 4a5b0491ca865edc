"""Muon: orthogonalized momentum (its polar factor) for hidden matrices; AdamW for everything else.

For a matrix W (m x n) with gradient G (Jordan et al., 2024):
    M <- b M + (1 - b) G;   U = (1 - b) G + b M;   W <- (1 - lr wd) W - lr sqrt(max(1, m/n)) polar(U)
NorMuon (`neuron_beta`; Li et al., 2025) divides each row of polar(U) by the root of a running mean of its squares.
Matrices of the same shape are stacked and orthogonalized in one batch; fused q, k, v are split first. On several ranks
each matrix is orthogonalized by one of them, its owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from whimbrel.base.errors import OptimizerError
from whimbrel.distributed.owners import assign_owners, map_replicated, map_sharded
from whimbrel.distributed.sharded_rows import shard_of
from whimbrel.distributed.state import to_local
from whimbrel.optim.base import BaseOptimizer, check_numbers, lr_of
from whimbrel.optim.param_state import QuantizedParameter
from whimbrel.optim.rules import MIN_EPS, muon_batches, muon_scale, muon_updates, orthogonalize

__all__ = ["Muon"]

MIN_RMS = 1e-10
"""Added to the root mean square of a row, so that rows without updates are not divided by 0."""


class Matrix(NamedTuple):
    """A parameter, or a part of a fused one: local rows of weight, gradient and moments, and the complete shape."""

    weight: Tensor
    grad: Tensor
    momentum: Tensor
    second_moment: Tensor
    """One value per row; empty without `neuron_beta`."""
    shape: torch.Size
    rows: list[int]
    """Number of rows on each rank; empty if they are not sharded."""
    group: dist.ProcessGroup | None
    """Ranks that share the work: those that shard the parameter or, if it is replicated, have copies of it."""


class Muon(BaseOptimizer):
    """A parameter group has a `rule`: "muon" (2-D only, with optional `splits` of rows) or "adam" (torch's AdamW).

    With the rule "muon", `neuron_beta` selects NorMuon, and `cautious_decay` applies weight decay only to elements that
    the update moves toward zero (Chen et al., 2025).
    Ranks that shard a parameter (FSDP2) share the work; those with replicas (DDP) do if they are the `process_group`.
    """

    lazy_state = True
    layout_options = ("rule", "neuron_beta")
    process_group: dist.ProcessGroup | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        momentum_start: float | None = None,
        momentum_warmup: int = 0,
        neuron_beta: float | None = None,
        weight_decay: float = 0.0,
        cautious_decay: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        rule: str = "muon",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.process_group = process_group
        start = momentum if momentum_start is None else momentum_start
        defaults = {
            "lr": lr, "momentum": momentum, "momentum_start": start, "momentum_warmup": momentum_warmup,
            "neuron_beta": neuron_beta, "weight_decay": weight_decay, "cautious_decay": cautious_decay, "betas": betas,
            "eps": eps, "rule": rule,
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
        return _new_state(parameter, self._layouts[parameter])

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
                self.state[p] = _new_state(p, group)
            self.state[p]["step"] += 1
        step, warmup, lr = int(self.state[params[0][0]]["step"]) - 1, group["momentum_warmup"], lr_of(group)
        progress = min(1.0, step / warmup) if warmup else 1.0
        momentum = float(group["momentum_start"] + progress * (group["momentum"] - group["momentum_start"]))
        buffers = [to_local(self.state[p]["momentum"]) for p, _ in params]
        grads = [to_local(p.grad).to(buffer.dtype) for (p, _), buffer in zip(params, buffers, strict=True)]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        decay, is_cautious = lr * group["weight_decay"], group["cautious_decay"] and group["weight_decay"] > 0
        if not is_cautious:
            torch._foreach_mul_([to_local(p) for p, _ in params], 1 - decay)
        by_ranks: dict[Any, list[Matrix]] = {}
        for (p, splits_of_p), grad, buffer in zip(params, grads, buffers, strict=True):
            second = to_local(self.state[p].get("second_moment", buffer[:, :0]))
            for matrix in self._matrices(p, (grad, buffer, second), splits_of_p):
                by_ranks.setdefault(matrix.group, []).append(matrix)
        for matrices in by_ranks.values():
            owners = _owners(matrices)
            for batch in muon_batches([matrix.shape for matrix in matrices]):
                chosen = [matrices[i] for i in batch]
                factors = _directions(chosen, [owners[i] for i in batch], momentum)
                if group["neuron_beta"] is not None:
                    factors = _normalized_rows(factors, chosen, group["neuron_beta"])
                weights = [matrix.weight for matrix in chosen]
                updates = [factor.to(weight.dtype) for weight, factor in zip(weights, factors, strict=True)]
                if is_cautious:  # elements whose update, which is subtracted, has the sign of the weight
                    decayed = [torch.where(u * w > 0, w, 0.0) for u, w in zip(updates, weights, strict=True)]
                    torch._foreach_sub_(weights, decayed, alpha=decay)
                torch._foreach_add_(weights, updates, alpha=-lr * muon_scale(chosen[0].shape))

    def _matrices(self, p: Tensor, moments: tuple[Tensor, Tensor, Tensor], splits: Sequence[int]) -> list[Matrix]:
        """The matrices that are orthogonalized on their own: the parts of a fused parameter, or all of it.

        `moments` are the local rows of gradient, momentum and second moment.
        """
        shard, weight, lengths = shard_of(p), to_local(p).detach(), list(splits) or [p.shape[0]]
        counts: list[list[int]] = [[] for _ in lengths] if shard is None else shard.count_rows(lengths)
        local = lengths if shard is None else [rows[shard.rank] for rows in counts]
        group = self.process_group if shard is None else shard.group
        split = [tensor.split(local) for tensor in (weight, *moments)]
        return [
            Matrix(parts[0], parts[1], parts[2], parts[3], torch.Size((length, p.shape[1])), rows, group)
            for parts, length, rows in zip(zip(*split, strict=True), lengths, counts, strict=True)
            if length and p.shape[1]
        ]

    def _adam_step(self, group: dict[str, Any]) -> None:
        """Torch's AdamW, fused on a GPU."""
        params = [p for p in group["params"] if p.grad is not None and p.numel()]
        if not params:
            return
        for p in params:
            if not self.state[p]:
                self.state[p] = _new_state(p, group)
            if p.is_cuda:  # the fused kernel needs `step` on the GPU, even after load_state_dict
                self.state[p]["step"] = self.state[p]["step"].to(p.device)
        states = [self.state[p] for p in params]
        mixed = any(p.dtype == torch.float16 for p in params)  # fused and foreach need moments of the same dtype
        fused = not mixed and all(p.is_cuda for p in params)
        grads = [to_local(cast(Tensor, p.grad)).to(s["exp_avg"].dtype) for p, s in zip(params, states, strict=True)]
        adamw(
            [to_local(p) for p in params], grads, [to_local(s["exp_avg"]) for s in states],
            [to_local(s["exp_avg_sq"]) for s in states], [], [s["step"] for s in states],
            fused=fused, foreach=False if mixed else None, amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=lr_of(group),
            weight_decay=group["weight_decay"], eps=max(group["eps"], MIN_EPS), maximize=False,
        )  # fmt: skip


def _new_state(p: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
    dtype = torch.float32 if p.dtype == torch.float16 else p.dtype  # in fp16, eps and squares of gradients may be 0
    names = ("momentum",) if options["rule"] == "muon" else ("exp_avg", "exp_avg_sq")
    state = {name: torch.zeros_like(p, dtype=dtype) for name in names}
    if options["rule"] == "muon" and options["neuron_beta"] is not None:
        shard, local = shard_of(p), to_local(p)
        rows = torch.zeros(local.shape[0], 1, device=local.device)
        state["second_moment"] = rows if shard is None else shard.wrap(rows)
    return {"step": torch.zeros((), dtype=torch.float32), **state}


def _owners(matrices: Sequence[Matrix]) -> list[int]:
    """The rank that orthogonalizes each matrix; 0 in a single process."""
    group = matrices[0].group
    if group is None:
        return [0] * len(matrices)
    costs = [float(matrix.shape.numel() * min(matrix.shape)) for matrix in matrices]
    return assign_owners(costs, dist.get_world_size(group))


def _directions(matrices: Sequence[Matrix], owners: Sequence[int], momentum: float) -> Iterable[Tensor]:
    """The local rows of the polar factors for matrices of one shape."""
    dtype, group = torch.bfloat16 if matrices[0].weight.is_cuda else torch.float32, matrices[0].group
    updates = muon_updates([m.grad for m in matrices], [m.momentum for m in matrices], momentum, dtype)
    if group is None or updates[0].is_meta:  # parameters without values, in a prediction of memory
        return orthogonalize(torch.stack(updates))
    if matrices[0].rows:
        return map_sharded(orthogonalize, updates, [matrix.rows for matrix in matrices], owners, group)
    return map_replicated(orthogonalize, updates, owners, group)


def _normalized_rows(factors: Iterable[Tensor], matrices: Sequence[Matrix], beta: float) -> Iterable[Tensor]:
    """The local rows divided by the roots of their second moments, which are updated; norms of matrices stay the same.

    Rows of all matrices are concatenated, so that the number of kernels does not depend on that of matrices.
    """
    sizes = [len(matrix.weight) for matrix in matrices]
    rows = torch.cat(list(factors))
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float32)
    moments = [matrix.second_moment for matrix in matrices]
    second = torch.cat(moments).lerp_(norms.square() / rows.shape[1], 1 - beta)
    torch._foreach_copy_(moments, second.split(sizes))
    scales = second.sqrt_().add_(MIN_RMS).reciprocal_()
    totals = torch.stack(
        [torch.stack(torch._foreach_norm(list(values.split(sizes)))).square() for values in (norms, norms * scales)]
    )
    if matrices[0].rows and not totals.is_meta:
        dist.all_reduce(totals, group=matrices[0].group)
    before, after = totals.sqrt()
    ratios = (before / after.clamp(min=MIN_EPS)).split(1)
    scales *= torch.cat([ratio.expand(size, 1) for ratio, size in zip(ratios, sizes, strict=True)])
    normalized: tuple[Tensor, ...] = (rows * scales).split(sizes)
    return normalized
