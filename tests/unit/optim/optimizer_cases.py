"""The optimizers of the table of invariants, and what the invariants are tried on."""

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
    "large": (72, 60),  # the only one with numbers enough to be stored in 8 bits
    "tall": (24, 16),
    "wide": (16, 24),
    "vector": (5,),
    "number": (),
    "stack": (3, 8, 6),
    "convolution": (6, 4, 3, 3),
}


@dataclass(frozen=True)
class Entry:
    """An optimizer: how it is built, a learning rate that suits it, and the bytes of its state for a shape."""

    kind: type[torch.optim.Optimizer]
    lr: float
    bytes_of: Callable[[tuple[int, ...]], int]
    settings: dict[str, Any] = field(default_factory=dict)

    def __call__(self, params: Sequence[Tensor], **settings: Any) -> Any:
        """One over `params`, with `settings` beside its own; of Muon's, all but matrices are moved by Adam."""
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
    """How many matrices a shape is, their rows and their columns."""
    if len(shape) > 3:
        return 1, shape[0], math.prod(shape[1:])
    return (shape[0] if len(shape) == 3 else 1), shape[-2], shape[-1]


def int8(rows: int, width: int) -> int:
    """Codes, and a scale for every 256 of a row."""
    return rows * (width + 4 * math.ceil(width / 256))


def int4(rows: int, width: int) -> int:
    return rows * (math.ceil(width / 2) + 4 * math.ceil(width / 256))


def fp32(rows: int, width: int) -> int:
    return 4 * rows * width


def bf16(rows: int, width: int) -> int:
    return 2 * rows * width


def whole(shape: tuple[int, ...], *moments: Callable[[int, int], int]) -> int:
    """A step, a seed and moments of the shape itself."""
    small = math.prod(shape) < 4096
    width = shape[-1] if shape else 1
    return 16 + sum((fp32 if small else moment)(math.prod(shape) // width, width) for moment in moments)


def low(
    shape: tuple[int, ...],
    side: str,
    moments: Sequence[Callable[[int, int], int]] = (fp32, fp32),
    basis: Callable[[int, int], int] | None = fp32,
    rank: int = 4,
    more: Callable[[int, int, int], int] = lambda count, rows, columns: 0,
) -> int:
    """A step and a seed, moments and a basis in the subspace (with due, gap and failures), and what there is more."""
    if len(shape) < 2:
        return whole(shape, *moments)
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
    """As `low`, but for a step of four bytes and neither seed nor due, gap and failures."""
    if len(shape) < 2:
        return 4 + 8 * math.prod(shape)
    return low(shape, "std") - 28 - 4 * matrices(shape)[0]


def muon(shape: tuple[int, ...]) -> int:
    return 4 + (4 if len(shape) == 2 else 8) * math.prod(shape)


def length(count: int, rows: int, columns: int) -> int:
    return 4 * count


def error(count: int, rows: int, columns: int) -> int:
    return 4 * count * rows * columns


def lion(shape: tuple[int, ...]) -> int:
    """`cheapest` keeps the shorter side where a moment of 2 bytes meets a basis of 1, at equal rank."""
    options = [low(shape, side, (bf16,), int8) for side in ("right", "left")]
    return min(options)


def factored(shape: tuple[int, ...], rank: int | None, store: Callable[[int, int], int]) -> int:
    """Adafactor's means over columns and over rows; vectors have the moments of AdamW."""
    if len(shape) < 2:
        return whole(shape, store, store)
    store = fp32 if math.prod(shape) < 4096 else store
    count, rows, columns = matrices(shape)
    return 16 + store(count, rows) + store(count, columns if rank is None else rank)


def polar(shape: tuple[int, ...]) -> int:
    return whole(shape, fp32, fp32) if len(shape) < 2 else low(shape, "std", (fp32,))


LOW = {"rank": 4, "gap": 5}
ENTRIES: dict[str, Entry] = {
    "galore": Entry(GaLore, 0.02, galore, {"rank": 4, "update_proj_gap": 5, "scale": 1.0}),
    "adamw8bit": Entry(optim.AdamW8bit, 0.02, lambda shape: whole(shape, int8, int8), {"weight_decay": 0.0}),
    "galore_warm": Entry(optim.GaLoreWarm, 0.02, lambda shape: low(shape, "right"), LOW),
    "qgalore": Entry(optim.QGaLore, 0.02, lambda shape: low(shape, "std", (int8, int8), int4), LOW | {"scale": 1.0}),
    "apollo": Entry(optim.Apollo, 0.02, lambda shape: low(shape, "std", basis=None, more=length), LOW),
    "apollo_mini": Entry(
        optim.ApolloMini, 0.02, lambda shape: low(shape, "std", basis=None, rank=1, more=length),
        {"gap": 5, "scale": 1.0},
    ),
    "fira": Entry(optim.Fira, 0.02, lambda shape: low(shape, "std", more=length), LOW | {"scale": 1.0}),
    "ldadam": Entry(optim.LDAdam, 0.02, lambda shape: low(shape, "std", more=error), {"rank": 4}),
    "muon": Entry(Muon, 0.05, muon),
    "adamw, bf16": Entry(LowRankOptimizer, 0.02, lambda shape: whole(shape, bf16, bf16), {"store": "bf16"}),
    "warm adamw, int8, int4": Entry(
        LowRankOptimizer, 0.02, lambda shape: low(shape, "right", (int8, int8), int4),
        LOW | {"store": "int8", "basis_store": "int4", "start": "random", "lazy": True, "moment_transfer": "align"},
    ),
    "svd sgd, transported": Entry(
        LowRankOptimizer, 0.1, lambda shape: low(shape, "left", (fp32,)),
        LOW | {"rule": "sgd", "subspace": "svd", "side": "left", "moment_transfer": "both"},
    ),
    "warm lion, bf16, int8": Entry(
        LowRankOptimizer, 0.01, lion,
        LOW | {"rule": "lion", "store": "bf16", "basis_store": "int8", "side": "cheapest", "moment_transfer": "align"},
    ),
    "warm muon": Entry(
        LowRankOptimizer, 0.05, polar, LOW | {"rule": "muon", "side": "std", "moment_transfer": "first"}
    ),
    "warm adamw, fed back": Entry(
        LowRankOptimizer, 0.02, lambda shape: low(shape, "right", more=error), LOW | {"error_feedback": True}
    ),
    "random adafactor": Entry(
        LowRankOptimizer, 0.01, lambda shape: factored(shape, 4, fp32),
        LOW | {"rule": "adafactor", "subspace": "random"},
    ),
    "adafactor, int8": Entry(
        LowRankOptimizer, 0.05, lambda shape: factored(shape, None, int8), {"rule": "adafactor", "store": "int8"}
    ),
    "random sgd, apollo": Entry(
        LowRankOptimizer, 0.05, lambda shape: low(shape, "right", (fp32,), None, more=length),
        LOW | {"rule": "sgd", "subspace": "random", "back_projection": "apollo"},
    ),
}  # fmt: skip
"""Every preset, and some of the other choices of each axis."""
LOW_RANK = {name: entry for name, entry in ENTRIES.items() if entry.low_rank}


def random(shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """One of each shape, the same every time; matrices first, as Muon's groups have them."""
    return [nn.Parameter(random(shape, seed, dtype)) for seed, shape in enumerate(SHAPES.values())]


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def move(optimizer: torch.optim.Optimizer, steps: range, size: float = 1.0) -> None:
    """Steps by gradients of the step and the parameter's place alone."""
    for step in steps:
        for place, p in enumerate(params_of(optimizer)):
            p.grad = (random(p.shape, 100 * step + place) * size).to(p.dtype)
        optimizer.step()


def everything(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A copy of all parameters and all state, by name."""
    found = {f"{i}": p.detach().clone() for i, p in enumerate(params_of(optimizer))}
    for i, p in enumerate(params_of(optimizer)):
        found |= {f"{i} {name}": tensor.clone() for name, tensor in optimizer.state[p].items()}
    return found


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names under which two copies are not the same bits."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one
        or name not in other
        or one[name].dtype != other[name].dtype
        or not torch.equal(one[name], other[name])
    ]


class Teacher:
    """A small problem: a network of two layers learns another's answers."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.x = random((96, 60), seed + 1)
        self.y = torch.tanh(self.x @ random((60, 72), seed + 2) / 8) @ random((72, 8), seed + 3) / 8
        first, second = random((72, 60), seed + 4) / 8, random((8, 72), seed + 5) / 8
        self.params = [nn.Parameter(w.to(dtype)) for w in (first, torch.zeros(72), second, torch.zeros(8))]

    def loss(self) -> Tensor:
        """Mean squared error, after its gradients were taken."""
        for p in self.params:
            p.grad = None
        w1, b1, w2, b2 = (p.float() for p in self.params)
        loss = (torch.tanh(self.x @ w1.mT + b1) @ w2.mT + b2 - self.y).square().mean()
        loss.backward()
        return loss.detach()

    def fit(self, optimizer: torch.optim.Optimizer, steps: int) -> tuple[float, float]:
        """Losses before and after."""
        before = float(self.loss())
        for _ in range(steps):
            optimizer.step()
            self.loss()
        return before, float(self.loss())
