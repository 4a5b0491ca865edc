"""One optimizer from four choices: a subspace, a rule, a lift back to the weight, and how numbers are stored.

For a weight W (m x n) with gradient G, a basis Q (n x r) and R = G Q, a step is
    N = rule(R);   W <- (1 - lr wd) W - lr scale lift(N, Q, G)
with the moments of the rule in the shape of R. Without `rank`, Q is the identity and W moves by the rule itself.
Matrices are taken as they are; a convolution as (out, rest); three dimensions as a stack of matrices.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whimbrel.base.errors import OptimizerError
from whimbrel.ops import kernels_of
from whimbrel.optim.careful import LARGEST, Careful, examine, run_eagerly
from whimbrel.optim.check import check_alike, check_fits, check_group, check_keys, lr_of
from whimbrel.optim.lift import Lifted, lift
from whimbrel.optim.refresh import follow, is_due, planned, refresh
from whimbrel.optim.rules import RULES
from whimbrel.optim.shards import all_true, copy_, draw
from whimbrel.optim.slot import ON_HOST, Slot
from whimbrel.optim.store import CodedWeight, add_rounded_
from whimbrel.optim.subspace import cholesky_qr, drop_rounding_, random_basis

__all__ = ["Composed"]

AT_ONCE = 1 << 24
"""Numbers that one batch of work takes on, so that what it needs beside the state stays small."""
IN_CACHE = 1 << 18
"""The same on a CPU for rules that go element by element: temporaries stay in the cache and their memory is reused."""


class Piece(NamedTuple):
    """Some rows of a parameter's matrix, or all of them, and their gradient in the subspace."""

    slot: Slot
    low: Tensor
    rows: slice | None


class Composed(Careful):
    """Any subspace with any rule, lift and store; the presets are this with their papers' choices.

    rank: of the subspace; None: none, the rule moves the weight itself. In a group with a rank, tensors of fewer than
    two dimensions have none.
    subspace: svd (exact, slow), warm (one power step from the last basis), random (Gaussian from a seed, kept nowhere).
    rule: adamw, sgd, lion, muon, adafactor. lift: back, fira, apollo, apollo_mini.
    store, basis_store: of moments (fp32, bf16, int8) and of the basis (those and int4).
    side: right (columns are projected away, the input side of a linear), left, std (the shorter side is), cheapest.
    gap: steps between two bases; lazy: it grows while bases stay alike and shrinks while they move.
    carry: how moments follow a new basis: align (a warm one is turned to the old, and they stay), turn (the first is
    turned to the new), transport (both are, the second as far as it can be), keep (as they are).
    start: gradient (the first basis is from the first gradient) or random (by chance, and from gradients soon after).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        rank: int | None = None,
        subspace: str = "warm",
        rule: str = "adamw",
        lift: str = "back",
        store: str = "fp32",
        basis_store: str = "fp32",
        side: str = "right",
        gap: int = 200,
        lazy: bool = False,
        carry: str = "keep",
        start: str = "gradient",
        scale: float = 1.0,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        error_feedback: bool = False,
        maximize: bool = False,
        foreach: bool = True,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "rank": rank, "subspace": subspace, "rule": rule, "lift": lift, "store": store,
            "basis_store": basis_store, "side": side, "gap": gap, "lazy": lazy, "carry": carry, "start": start,
            "scale": scale, "betas": betas, "eps": eps, "momentum": momentum, "weight_decay": weight_decay,
            "error_feedback": error_feedback, "maximize": maximize, "foreach": foreach, "seed": seed,
        }  # fmt: skip
        self._slots: dict[Tensor, Slot] = {}
        self._overlaps: list[tuple[Slot, dict[str, Tensor], Tensor]] = []
        self.projected: dict[Tensor, Tensor] = {}
        """Gradients that came projected, by their parameter; `project_in_backward` fills it, a step empties it."""
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check a group, and allocate its state."""
        check_keys(type(self).__name__, param_group, self.defaults)
        check_group(self.defaults | param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            slots = [Slot(parameter, group, len(self._slots) + i) for i, parameter in enumerate(group["params"])]
        except OptimizerError:
            self.param_groups.pop()
            raise
        for slot in slots:
            self._slots[slot.parameter] = slot
            if slot.parameter.requires_grad:  # a frozen one gets its state when it is moved for the first time
                self._reset(slot)

    def reset(self) -> None:
        """Forget everything: moments, steps and bases, as at construction."""
        self.projected.clear()
        for slot in self._slots.values():
            if self.state[slot.parameter]:
                self._reset(slot)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """As of every careful optimizer; also of parameters whose gradients came projected."""
        loss = super().step(closure)
        self._forget_projected()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state, bit for bit: nothing is cast, and what does not fit is refused before anything changes."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise OptimizerError("the state is of other groups of parameters: build the optimizer as it was when saved")
        for group, saved in zip(self.param_groups, groups, strict=True):
            check_alike(group, saved)
            check_group(group | {name: value for name, value in saved.items() if name in group})
        pairs = [
            (p, state_dict["state"].get(key, {}))
            for group, saved in zip(self.param_groups, groups, strict=True)
            for p, key in zip(group["params"], saved["params"], strict=True)
            if p.requires_grad or key in state_dict["state"]
        ]
        for parameter, saved in pairs:
            if saved and not self.state[parameter]:
                self._reset(self._slots[parameter])
            check_fits(self.state[parameter], saved, self.describe(parameter))
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(copy.deepcopy({name: value for name, value in saved.items() if name != "params"}))
        for parameter, saved in pairs:
            for name, value in saved.items():
                copy_(self.state[parameter][name], value)
        for slot in self._slots.values():
            slot.keep_layout()
        self.skipped = int(state_dict.get("skipped", 0))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has slots of its own, over its own groups."""
        super().__setstate__(state)
        self.projected, self._overlaps = {}, []
        self._slots = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self._slots[parameter] = Slot(parameter, group, len(self._slots))

    # What `project_in_backward`, summaries and callbacks ask

    def slot(self, parameter: Tensor) -> Slot:
        """Shapes and codecs of a parameter."""
        return self._slots[parameter]

    def refreshes(self, parameter: Tensor) -> bool:
        """Whether the next step seeks a new basis for a parameter, for which it needs the whole gradient."""
        return is_due(self.state[parameter])

    @property
    def projects(self) -> bool:
        """Whether some parameters move by the projection of their gradient alone."""
        return any(not self.needs_whole(parameter) for parameter in self._slots)

    def needs_whole(self, parameter: Tensor) -> bool:
        """Whether every update of a parameter takes more of the gradient than its projection."""
        slot = self._slots[parameter]
        return slot.rank is None or slot.group["lift"] != "back" or slot.group["error_feedback"]

    def basis(self, parameter: Tensor) -> Tensor:
        """The basis Q that the gradient of a parameter is projected by, in the next step."""
        return self._basis(self._slots[parameter], int(self.state[parameter]["step"]))

    def matrix(self, parameter: Tensor, like: Tensor) -> Tensor:
        """A tensor of a parameter's shape as the matrix whose columns the basis projects away."""
        return self._slots[parameter].view(like)

    def describe(self, parameter: Tensor) -> str:
        """What a parameter got, in a few words."""
        return self._slots[parameter].describe()

    def state_bytes(self, parameter: Tensor) -> int:
        """Bytes of the state of a parameter, by arithmetic alone."""
        return self._slots[parameter].bytes_of()

    # The parts of a step; those that it calls by itself run eagerly under torch.compile

    @run_eagerly
    def _forget_projected(self) -> None:
        self.projected.clear()

    def _moving(self, group: Mapping[str, Any]) -> list[Tensor]:
        """The parameters of a group that have a gradient, whole or projected."""
        return [p for p in group["params"] if p.numel() and (p.grad is not None or p in self.projected)]

    @run_eagerly
    def _gradients(self) -> list[Tensor]:
        params = [p for group in self.param_groups for p in self._moving(group)]
        found = ((self._slots[p], self.projected.get(p, p.grad)) for p in params)
        return [slot.here(grad) for slot, grad in found if grad is not None]

    @run_eagerly
    def _finite(self, grads: list[Tensor]) -> bool:
        """Here, and on all ranks that have parts of a parameter."""
        finite, self._huge = examine(grads)
        return all_true(finite.to(next(iter(self._slots)).device), (slot.shard for slot in self._slots.values()))

    @run_eagerly
    def _move_bounded(self) -> None:
        for low in self.projected.values():
            if low.dtype != torch.float16:
                low.clamp_(-LARGEST, LARGEST)
        super()._move_bounded()

    @run_eagerly
    def _move_all(self) -> None:
        self._overlaps.clear()
        for group in self.param_groups:
            params = self._moving(group)
            for p in params:
                self._slots[p].check_layout()
                self._settle(self._slots[p])
            lr = lr_of(group)
            for batch in self._batches(group, params):
                self._update(batch, lr)
        follow(self._overlaps)

    def _batches(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> Iterator[list[Piece]]:
        """The work of a group in batches of bounded size: parameters together, or some rows of a large one."""
        batch: list[Piece] = []
        size = 0
        for parameter in params:
            slot = self._slots[parameter]
            low = self._project(slot)
            for rows in _cuts(slot):
                piece = Piece(slot, low[rows] if rows else low, rows)
                apart = not group["foreach"] or size + piece.low.numel() > _at_once(slot)
                if batch and (apart or batch[-1].low.device != low.device):
                    yield batch
                    batch, size = [], 0
                batch.append(piece)
                size += piece.low.numel()
        if batch:
            yield batch

    def _project(self, slot: Slot) -> Tensor:
        """The gradient in the subspace, after a new basis was found where one was due; and count the step."""
        parameter, state = slot.parameter, self._state(slot)
        if (low := self.projected.get(parameter)) is not None:
            state["step"] += 1
            return drop_rounding_(low, slot.shape[-1]) if slot.is_exact(low) else low
        assert parameter.grad is not None
        grad = slot.view(parameter.grad)
        if slot.rank is None:
            state["step"] += 1
            return grad
        if grad.dtype == torch.float16:  # products of gradients exceed its range
            grad = grad.float()
        if "error" in state:
            grad = state["error"].add_(grad)
        if is_due(state):
            overlap = refresh(slot, state, grad)
            if overlap is not None:
                self._overlaps.append((slot, state, overlap))
        basis = self._basis(slot, int(state["step"]))
        state["step"] += 1
        low = grad @ basis.to(grad.dtype)
        if slot.is_exact(low):
            drop_rounding_(low, slot.shape[-1])
        if "error" in state:
            state["error"].sub_(low @ basis.mT)
        return low

    def _basis(self, slot: Slot, step: int) -> Tensor:
        """Q: the one that is kept, or the random one of `step`, drawn again from its seed."""
        state = self._state(slot)
        if slot.basis_codec is not None:
            return slot.read(state, "basis")
        generator = slot.generator(state, salt=-1, step=step // slot.group["gap"])
        assert slot.rank is not None
        return random_basis(slot.shape, slot.rank, generator, slot.parameter.device, slot.shard)

    def _update(self, batch: Sequence[Piece], lr: float) -> None:
        """Rule, lift and weights, for a batch of pieces."""
        by_rule: dict[str, list[Piece]] = defaultdict(list)
        for piece in batch:
            by_rule[piece.slot.rule_name].append(piece)
        for name, pieces in by_rule.items():
            states = [self._state(piece.slot) for piece in pieces]
            lows = [piece.low.float() for piece in pieces]
            moments = {
                moment: [
                    piece.slot.read(state, moment, piece.rows) for piece, state in zip(pieces, states, strict=True)
                ]
                for moment in RULES[name].moments
            }
            steps = [int(state["step"]) for state in states]
            directions = RULES[name].update(lows, moments, steps, pieces[0].slot.settings)
            for moment, values in moments.items():
                for piece, state, value in zip(pieces, states, values, strict=True):
                    noise = piece.slot.noise(state, moment, value.shape, piece.rows)
                    piece.slot.write(state, moment, value, piece.rows, noise)
            for piece, low, direction in zip(pieces, lows, directions, strict=True):
                self._move(piece, low, direction, lr)

    def _move(self, piece: Piece, low: Tensor, direction: Tensor, lr: float) -> None:
        """Move the rows of a piece: W <- (1 - lr wd) W - lr scale (A Q^T + c G)."""
        slot, rows, state = piece.slot, piece.rows, self._state(piece.slot)
        group, weight = slot.group, slot.view(slot.parameter)
        weight = weight[rows] if rows else weight
        coded = isinstance(weight, CodedWeight)
        rate, decay = -lr if group["maximize"] else lr, lr * group["weight_decay"]
        lifted, basis, grad = Lifted(direction, None), None, None
        if slot.rank is not None:
            rate *= group["scale"]
            if "length" in state:
                assert slot.parameter.grad is not None
                grad = slot.view(slot.parameter.grad)
                lifted = lift(group["lift"], direction, low, grad, state["length"], slot.shard)
            basis = None if lifted.low is None else self._basis(slot, int(state["step"]) - 1)
        if weight.dtype == torch.float32 and lifted.low is not None and grad is None and not coded:
            _add_product_(weight, lifted.low, basis, -rate, 1 - decay)
            return
        generator = slot.generator(state, salt=2 + slot.first(rows))
        stored = weight.mT if slot.across else weight
        for part in _parts(stored):
            here = stored[part]
            change = (here.dequantize() if isinstance(here, CodedWeight) else here).float() * -decay
            moved = change.mT if slot.across else change
            own = slice(None) if slot.across else part
            if lifted.low is not None:
                sliced = slot.across or (basis is not None and basis.ndim > 2)
                _add_product_(moved, lifted.low[own], basis[part] if basis is not None and sliced else basis, -rate)
            if lifted.factor is not None and grad is not None:
                grads = grad[:, part] if slot.across else grad[part]
                moved.addcmul_(lifted.factor[own], grads.float(), value=-rate)
            add_rounded_(here, change, generator)

    def _state(self, slot: Slot) -> dict[str, Tensor]:
        """The state of a parameter, as far as it is on this rank."""
        state: dict[str, Tensor] = self.state[slot.parameter]
        return state if slot.shard is None else {name: slot.here(tensor) for name, tensor in state.items()}

    @torch.no_grad()
    def _settle(self, slot: Slot) -> None:
        """State for a parameter that was frozen, and on the device of one that has been moved to another."""
        parameter = slot.parameter
        if not self.state[parameter]:
            self._reset(slot)
        elif slot.device(self.state[parameter]) != parameter.device:
            moved = {
                name: t if name in ON_HOST else t.to(parameter.device) for name, t in self.state[parameter].items()
            }
            self.state[parameter] = moved

    def _reset(self, slot: Slot) -> None:
        """State as at construction; in the tensors that there are, since others may hold on to them."""
        fresh, own = slot.allocate(), self.state[slot.parameter]
        for name, tensor in fresh.items():
            if name in own:
                copy_(own[name], tensor)
            else:
                own[name] = tensor
        state = self._state(slot)
        if "due" in state and slot.group["start"] == "random":
            state["due"].fill_(planned(slot, 0)[0])
            if not slot.parameter.is_meta:
                shape, device = slot.basis_shape, slot.parameter.device
                shard = slot.shard if len(shape) > 2 else None
                noise = draw(shape, slot.generator(state, salt=0), device, shard)
                slot.write(state, "basis", cholesky_qr(noise)[0])


def _add_product_(total: Tensor, low: Tensor, basis: Tensor | None, scale: float, keep: float = 1.0) -> None:
    """`total = keep * total + scale * low @ basis^T` with no matrix of that size beside it; None is the identity."""
    if basis is None:
        (total if keep == 1.0 else total.mul_(keep)).add_(low, alpha=scale)
    elif total.ndim == 2:
        total.addmm_(low, basis.mT, beta=keep, alpha=scale)
    else:
        total.baddbmm_(low, basis.mT, beta=keep, alpha=scale)


def _at_once(slot: Slot) -> int:
    """How many numbers of a parameter and others like it are worked on together."""
    return min(AT_ONCE, IN_CACHE) if kernels_of(slot.parameter) == "cpu" and slot.rule.row_by_row else AT_ONCE


def _cuts(slot: Slot) -> list[slice | None]:
    """Rows that are worked on at a time: all (None) where they are few, or where rule or lift needs them together."""
    at_once = _at_once(slot) if slot.rank is None and slot.moment_store == "int8" else AT_ONCE
    if slot.low_shape.numel() <= at_once or slot.low_shape[0] < 2 or not slot.row_by_row:
        return [None]
    rows = max(1, at_once * slot.low_shape[0] // slot.low_shape.numel())
    return [slice(start, start + rows) for start in range(0, slot.low_shape[0], rows)]


def _parts(weight: Tensor) -> list[slice]:
    """Rows whose change exists at a time."""
    rows = weight.shape[0] if weight.ndim else 0
    size = max(1, AT_ONCE * rows // max(weight.numel(), 1))
    return [slice(start, start + size) for start in range(0, rows, size)]
