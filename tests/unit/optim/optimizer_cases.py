"""The optimizers that the invariant tests run on, and their shapes, gradients and a small training problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from whimbrel import optim
from whimbrel.optim import GaLore, LowRankOptimizer, Muon

SHAPES: dict[str, tuple[int, ...]] = {
    "large": (72, 60),  # the only one large enough for 8-bit state
    "tall": (24, 16),
    "wide": (16, 24),
    "vector": (5,),
    "number": (),
    "stack": (3, 8, 6),
    "convolution": (6, 4, 3, 3),
}


@dataclass(frozen=True)
class Case:
    """An optimizer class with options, a suitable learning rate, and the bytes of its state for a shape."""

    kind: type[torch.optim.Optimizer]
    lr: float
    bytes_of: Callable[[tuple[int, ...]], int]
    settings: dict[str, Any] = field(default_factory=dict)

    def __call__(self, params: Sequence[Tensor], **settings: Any) -> Any:
        """Build it over `params`; Muon updates only the matrices, its Adam group the others."""
        settings = {"lr": self.lr} | self.settings | settings
        if self.kind is not Muon:
            return self.kind(params, **settings)
        matrices = [p for p in params if p.ndim == 2]
        others = [p for p in params if p.ndim != 2]
        groups = [{"params": matrices}, {"params": others, "rule": "adam", "lr": 0.01}]
        return Muon([group for group in groups if group["params"]], **settings)

    @property
    def low_rank(self) -> bool:
        return issubclass(self.kind, LowRankOptimizer)


def matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The number of matrices of a shape, their rows and columns."""
    if len(shape) > 3:
        return 1, shape[0], math.prod(shape[1:])
    return (shape[0] if len(shape) == 3 else 1), shape[-2], shape[-1]


def int8(rows: int, width: int) -> int:
    """Codes, and one scale per 256 of a row."""
    return rows * (width + 4 * math.ceil(width / 256))


def int4(rows: int, width: int) -> int:
    return rows * (math.ceil(width / 2) + 4 * math.ceil(width / 256))


def fp32(rows: int, width: int) -> int:
    return 4 * rows * width


def bf16(rows: int, width: int) -> int:
    return 2 * rows * width


def full_rank_bytes(shape: tuple[int, ...], *moments: Callable[[int, int], int]) -> int:
    """Bytes of step, seed and full-rank moments."""
    small = math.prod(shape) < 4096
    width = shape[-1] if shape else 1
    return 16 + sum((fp32 if small else moment)(math.prod(shape) // width, width) for moment in moments)


def low_rank_bytes(
    shape: tuple[int, ...],
    side: str,
    moments: Sequence[Callable[[int, int], int]] = (fp32, fp32),
    basis: Callable[[int, int], int] | None = fp32,
    rank: int = 4,
    more: Callable[[int, int, int], int] = lambda count, rows, columns: 0,
) -> int:
    """Bytes of step, seed, low-rank moments, basis (with due, gap and failures), and `more`."""
    if len(shape) < 2:
        return full_rank_bytes(shape, *moments)
    small = math.prod(shape) < 4096
    count, rows, columns = matrices(shape)
    if side == "left" or (side == "std" and rows < columns):
        rows, columns = columns, rows
    rank = min(rank, rows, columns)
    total = 16 + sum((fp32 if small else moment)(count * rows, rank) for moment in moments)
    if basis is not None:
        total += 16 + 4 * count + basis(count * columns, rank)
    return total + more(count, rows, columns)


def galore(shape: tuple[int, ...]) -> int:
    """As `low_rank_bytes`, with a step of four bytes and without seed, due, gap and failures."""
    if len(shape) < 2:
        return 4 + 8 * math.prod(shape)
    return low_rank_bytes(shape, "std") - 28 - 4 * matrices(shape)[0]


def muon(shape: tuple[int, ...]) -> int:
    return 4 + (4 if len(shape) == 2 else 8) * math.prod(shape)


def normuon(shape: tuple[int, ...]) -> int:
    """And a second moment per row."""
    return muon(shape) + (4 * shape[0] if len(shape) == 2 else 0)


def length(count: int, rows: int, columns: int) -> int:
    return 4 * count


def error_feedback_bytes(count: int, rows: int, columns: int) -> int:
    return 4 * count * rows * columns


def lion(shape: tuple[int, ...]) -> int:
    """`cheapest` is the smaller of both sides: a moment of 2 bytes and a basis of 1."""
    options = [low_rank_bytes(shape, side, (bf16,), int8) for side in ("right", "left")]
    return min(options)


def factored(shape: tuple[int, ...], rank: int | None, store: Callable[[int, int], int]) -> int:
    """Adafactor's means over columns and over rows; vectors have the moments of AdamW."""
    if len(shape) < 2:
        return full_rank_bytes(shape, store, store)
    store = fp32 if math.prod(shape) < 4096 else store
    count, rows, columns = matrices(shape)
    return 16 + store(count, rows) + store(count, columns if rank is None else rank)


def polar(shape: tuple[int, ...]) -> int:
    return full_rank_bytes(shape, fp32, fp32) if len(shape) < 2 else low_rank_bytes(shape, "std", (fp32,))


LOW = {"rank": 4, "gap": 5}
CASES: dict[str, Case] = {
    "galore": Case(GaLore, 0.02, galore, {"rank": 4, "update_proj_gap": 5, "scale": 1.0}),
    "adamw8bit": Case(optim.AdamW8bit, 0.02, lambda shape: full_rank_bytes(shape, int8, int8), {"weight_decay": 0.0}),
    "galore_warm": Case(optim.GaLoreWarm, 0.02, lambda shape: low_rank_bytes(shape, "right"), LOW),
    "qgalore": Case(
        optim.QGaLore, 0.02, lambda shape: low_rank_bytes(shape, "std", (int8, int8), int4), LOW | {"scale": 1.0}
    ),
    "apollo": Case(optim.Apollo, 0.02, lambda shape: low_rank_bytes(shape, "std", basis=None, more=length), LOW),
    "apollo_mini": Case(
        optim.ApolloMini, 0.02, lambda shape: low_rank_bytes(shape, "std", basis=None, rank=1, more=length),
        {"gap": 5, "scale": 1.0},
    ),
    "fira": Case(optim.Fira, 0.02, lambda shape: low_rank_bytes(shape, "std", more=length), LOW | {"scale": 1.0}),
    "ldadam": Case(
        optim.LDAdam, 0.02, lambda shape: low_rank_bytes(shape, "std", more=error_feedback_bytes), {"rank": 4}
    ),
    "muon": Case(Muon, 0.05, muon),
    "normuon": Case(Muon, 0.05, normuon, {"neuron_beta": 0.9}),
    "adamw, bf16": Case(LowRankOptimizer, 0.02, lambda shape: full_rank_bytes(shape, bf16, bf16), {"store": "bf16"}),
    "warm adamw, int8, int4": Case(
        LowRankOptimizer, 0.02, lambda shape: low_rank_bytes(shape, "right", (int8, int8), int4),
        LOW | {"store": "int8", "basis_store": "int4", "start": "random", "lazy": True, "moment_transfer": "align"},
    ),
    "svd sgd, both moments": Case(
        LowRankOptimizer, 0.1, lambda shape: low_rank_bytes(shape, "left", (fp32,)),
        LOW | {"rule": "sgd", "subspace": "svd", "side": "left", "moment_transfer": "both"},
    ),
    "warm lion, bf16, int8": Case(
        LowRankOptimizer, 0.01, lion,
        LOW | {"rule": "lion", "store": "bf16", "basis_store": "int8", "side": "cheapest", "moment_transfer": "align"},
    ),
    "warm muon": Case(
        LowRankOptimizer, 0.05, polar, LOW | {"rule": "muon", "side": "std", "moment_transfer": "first"}
    ),
    "warm adamw, error feedback": Case(
        LowRankOptimizer, 0.02, lambda shape: low_rank_bytes(shape, "right", more=error_feedback_bytes),
        LOW | {"error_feedback": True},
    ),
    "random adafactor": Case(
        LowRankOptimizer, 0.01, lambda shape: factored(shape, 4, fp32),
        LOW | {"rule": "adafactor", "subspace": "random"},
    ),
    "adafactor, int8": Case(
        LowRankOptimizer, 0.05, lambda shape: factored(shape, None, int8), {"rule": "adafactor", "store": "int8"}
    ),
    "random sgd, apollo": Case(
        LowRankOptimizer, 0.05, lambda shape: low_rank_bytes(shape, "right", (fp32,), None, more=length),
        LOW | {"rule": "sgd", "subspace": "random", "back_projection": "apollo"},
    ),
}  # fmt: skip
"""Every preset, and other combinations that cover each option."""
LOW_RANK = {name: entry for name, entry in CASES.items() if entry.low_rank}


def random(shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """One parameter of each shape, always the same; matrices first, as in the groups of Muon."""
    return [nn.Parameter(random(shape, seed, dtype)) for seed, shape in enumerate(SHAPES.values())]


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def run_steps(optimizer: torch.optim.Optimizer, steps: range, size: float = 1.0) -> None:
    """Step with gradients that depend only on the step and the index of the parameter."""
    for step in steps:
        for index, p in enumerate(params_of(optimizer)):
            p.grad = (random(p.shape, 100 * step + index) * size).to(p.dtype)
        optimizer.step()


def snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A copy of all parameters and all state, by name."""
    found = {f"{i}": p.detach().clone() for i, p in enumerate(params_of(optimizer))}
    for i, p in enumerate(params_of(optimizer)):
        found |= {f"{i} {name}": tensor.clone() for name, tensor in optimizer.state[p].items()}
    return found


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not bit-identical."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one
        or name not in other
        or one[name].dtype != other[name].dtype
        or not torch.equal(one[name], other[name])
    ]


class Teacher:
    """A small regression problem: a two-layer network learns the outputs of another."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.x = random((96, 60), seed + 1)
        self.y = torch.tanh(self.x @ random((60, 72), seed + 2) / 8) @ random((72, 8), seed + 3) / 8
        first, second = random((72, 60), seed + 4) / 8, random((8, 72), seed + 5) / 8
        self.params = [nn.Parameter(w.to(dtype)) for w in (first, torch.zeros(72), second, torch.zeros(8))]

    def loss(self) -> Tensor:
        """Mean squared error; computes the gradients too."""
        for p in self.params:
            p.grad = None
        w1, b1, w2, b2 = (p.float() for p in self.params)
        loss = (torch.tanh(self.x @ w1.mT + b1) @ w2.mT + b2 - self.y).square().mean()
        loss.backward()
        return loss.detach()

    def fit(self, optimizer: torch.optim.Optimizer, steps: int) -> tuple[float, float]:
        """The loss before and after training."""
        before = float(self.loss())
        for _ in range(steps):
            optimizer.step()
            self.loss()
        return before, float(self.loss())


def transferred_moments(
    m: Tensor, v: Tensor, overlap: Tensor, betas: tuple[float, float], t: int
) -> tuple[Tensor, Tensor]:
    """C = Q_old^T Q_new;  M' = M C;  V' = (1 - b2^t) [max(v^ - m^2, 0) (C o C) + (m^ C)^2]."""
    mean, square = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    variance = (square - mean**2).clamp(min=0)
    return m @ overlap, (1 - betas[1] ** t) * (variance @ overlap**2 + (mean @ overlap) ** 2)
