"""When a parameter gets a new basis, and how its moments follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whimbrel.optim.shards import gather, mean
from whimbrel.optim.slot import Slot
from whimbrel.optim.subspace import Basis, cold_basis, drop_rounding_, svd_basis, warm_basis

__all__ = ["SPREAD", "follow", "is_due", "planned", "refresh"]

State = dict[str, Tensor]
STEADY, MOVING = 0.9, 0.5
"""Overlaps of two bases in turn: above the first the gap doubles, below the second it halves."""
SPREAD = 64
"""Steps over which the first bases are sought where they start at random."""
REACH = 8
"""How many times the gap that was asked for a steady basis is kept at most; a moving one, that part of it at least."""


def planned(slot: Slot, until: int) -> list[int]:
    """The steps below `until`, from 0, in which a basis is sought, if each is found and gaps stay as they are.

    The first comes at once, or in one of the first steps where bases begin at random; the second between half a gap and
    one and a half later. No two parameters are alike in this, so that no step has many.
    """
    first = int(min(slot.group["gap"], SPREAD) * slot.phase) if slot.group["start"] == "random" else 0
    return [first, *range(first + _second(slot), until, slot.group["gap"])]


def _second(slot: Slot) -> int:
    """How many steps after the first basis the second is sought."""
    return max(1, round(slot.group["gap"] * (0.5 + slot.phase)) if slot.group["gap"] > 1 else 1)


def is_due(state: State) -> bool:
    """Whether the next step seeks a new basis, for which it needs the whole gradient."""
    return "due" in state and int(state["step"]) >= int(state["due"])


def refresh(slot: Slot, state: State, grad: Tensor) -> Tensor | None:
    """Seek a new basis and have the moments follow it; where none is found, all stays and it is sought again.

    Given back is the overlap of the two, for `follow`, where the gap is to follow it.

    In a stack, matrices without one (an expert that saw nothing) do not keep the others waiting. The first one empties
    the moments: what was learnt in no basis, or in one drawn by chance, says nothing of this one.
    """
    group, first = slot.group, int(state["gap"]) == 0
    old = slot.read(state, "basis")
    fresh = _seek(slot, state, grad, old, first=first)
    state["failures"] += ~fresh.found
    if first and not bool(mean(fresh.found, slot.shard)):
        state["due"].copy_(state["step"] + 1)
        return None
    if first:
        state["step"].zero_()
        for name in slot.rule.moments:
            slot.write(state, name, torch.zeros_like(slot.read(state, name)))
        state["gap"].fill_(group["gap"])
        state["due"].fill_(_second(slot))
    else:
        if group["carry"] in ("transport", "turn"):
            _transport(slot, state, old, fresh.basis)
        if not group["lazy"]:
            state["gap"].fill_(group["gap"])  # which may have changed since the state was saved
        state["due"].copy_(state["step"] + state["gap"])
    slot.write(state, "basis", fresh.basis)
    return mean(fresh.overlap, slot.shard) if group["lazy"] and not first else None


def follow(overlaps: Sequence[tuple[Slot, State, Tensor]]) -> None:
    """Longer gaps where bases stayed alike, shorter ones where they moved; all overlaps of a step are read at once."""
    values = torch.stack([overlap.cpu() for _, _, overlap in overlaps]).tolist() if overlaps else []
    for (slot, state, _), overlap in zip(overlaps, values, strict=True):
        gap = _next_gap(slot.group["gap"], int(state["gap"]), overlap)
        state["due"] += gap - state["gap"]
        state["gap"].fill_(gap)


def _seek(slot: Slot, state: State, grad: Tensor, old: Tensor, *, first: bool) -> Basis:
    assert slot.rank is not None
    if slot.group["subspace"] == "svd":
        grad = gather(grad, slot.shard)
        basis = svd_basis(grad, slot.rank)
        found = grad.abs().amax(dim=(-2, -1)) > 0
        overlap = torch.where(found, (old.mT @ basis).square().sum(dim=(-2, -1)) / slot.rank, torch.nan)
        return Basis(basis if first else torch.where(found[..., None, None], basis, old), overlap, found)
    if first:
        return cold_basis(grad, slot.rank, slot.generator(state, salt=1), slot.shard)
    low = grad @ old.to(grad.dtype)
    return warm_basis(grad, low, old, align=slot.group["carry"] == "align", shard=slot.shard)


def _next_gap(asked: int, gap: int, overlap: float) -> int:
    """Twice the gap while bases stay alike, half of it while they move; as it was where none was found (NaN)."""
    gap = min(gap, asked * REACH)
    if overlap > STEADY:
        return min(gap * 2, asked * REACH)
    return max(gap // 2, asked // REACH, 1) if overlap < MOVING else gap


def _transport(slot: Slot, state: State, old: Tensor, new: Tensor) -> None:
    """C = Q_old^T Q_new;  M' = M C;  V' = (1 - b2^t) [max(v^ - m^2, 0) (C o C) + (m^ C)^2], m^ and v^ unbiased.

    With carry = "turn", V stays. With error feedback, what of the first moment the new basis cannot hold goes to the
    error (LDAdam); it is orthogonal to that basis, so it changes nothing of the gradient's projection.
    """
    turn, t = old.mT @ new, int(state["step"])
    assert slot.rule.linear is not None
    first = slot.read(state, slot.rule.linear).clone()
    turned = first @ turn
    if slot.is_exact(turned):
        drop_rounding_(turned, slot.shape[-1])
    slot.write(state, slot.rule.linear, turned)
    if slot.rule_name != "adamw" or t == 0 or slot.group["carry"] == "turn":
        return
    beta1, beta2 = slot.settings["betas"]
    if "error" in state:
        state["error"].add_(first @ old.mT - turned @ new.mT, alpha=beta1 / (1 - beta1))
    mean = first / (1 - beta1**t)
    spread = (slot.read(state, "exp_avg_sq") / (1 - beta2**t) - mean.square()).clamp_(min=0)
    slot.write(state, "exp_avg_sq", (spread @ turn.square() + (mean @ turn).square()) * (1 - beta2**t))
