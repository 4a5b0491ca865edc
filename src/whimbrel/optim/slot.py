"""One parameter as the composed optimizer sees it: as a matrix, the right way round, with its state and its codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whimbrel.base.errors import OptimizerError
from whimbrel.optim.rules import RULES, Rule
from whimbrel.optim.shards import local, shard_of
from whimbrel.optim.store import BLOCK, CodedWeight, codec, uniform

__all__ = ["ON_HOST", "Slot"]

ON_HOST = ("step", "due", "gap", "seed")
"""Numbers of a state that steer the step, and stay on the CPU: reading them waits for no device."""
State = dict[str, Tensor]
"""Steps made, step of the next basis, steps between two and a seed (numbers on the host); moments, basis, and so on."""
SMALLEST = 4096
"""Moments of fewer numbers than this stay in fp32, where a few bytes are saved at most."""
PHASE = 0.6180339887498949
"""The golden ratio: its multiples, taken modulo 1, are spread evenly however many there are."""


LAYOUT = ("rank", "subspace", "rule", "lift", "store", "basis_store", "side", "error_feedback")
"""Settings of a group that the names and shapes of a state depend on."""


class Slot:
    """A parameter and its group: its shapes, and its state, which is flat tensors, all there from the beginning."""

    def __init__(self, parameter: Tensor, group: Mapping[str, Any], index: int) -> None:
        if not parameter.is_floating_point():
            raise OptimizerError(f"a parameter is of {parameter.dtype}, and only real ones can be moved: leave it out")
        self.parameter, self.group, self.index = parameter, group, index
        self.keep_layout()
        self.shard = shard_of(parameter)
        lowered = group["rank"] is not None and parameter.ndim >= 2
        self.rule_name = group["rule"] if RULES[group["rule"]].row_by_row or parameter.ndim >= 2 else "adamw"
        self.matrix_like = lowered or not self.rule.row_by_row
        self.transposed = False
        here = self.view(parameter).shape
        shape = here if self.shard is None else self.shard.whole(here)
        if parameter.ndim > 3 and self.view(parameter).data_ptr() != local(parameter).data_ptr():
            raise OptimizerError(
                f"a parameter of shape {tuple(parameter.shape)} lies in memory so that it is no matrix: give it as "
                "parameter.contiguous()"
            )
        self.rank = min(group["rank"], *shape[-2:]) if lowered else None
        self.moment_store = group["store"] if shape.numel() >= SMALLEST else "fp32"
        self.basis_codec = (
            None if group["subspace"] == "random" or not lowered else codec(group["basis_store"], "basis")
        )
        if lowered:
            self.transposed = self._turns(shape)
        self.shape = self.view(parameter).shape
        self.low_shape = self.shape if self.rank is None else torch.Size((*self.shape[:-1], self.rank))
        self.codecs = {name: codec(self.moment_store, kind) for name, kind in self.rule.moments.items()}
        self.shapes = self.rule.shapes(self.low_shape)
        if self.basis_codec is not None:
            self.codecs["basis"], self.shapes["basis"] = self.basis_codec, self.basis_shape
        if self.shard is not None and not self.shard.stacked:
            self._check_rows_apart()

    def keep_layout(self) -> None:
        """Remember the settings that the state is laid out for."""
        self.layout = {name: self.group[name] for name in LAYOUT}

    def check_layout(self) -> None:
        """Refuse a group whose settings no longer fit the state that was allocated for them."""
        for name, value in self.layout.items():
            if self.group[name] != value:
                raise OptimizerError(
                    f"the state of a parameter group was allocated for {name} = {value!r}, and the group now has "
                    f"{name} = {self.group[name]!r}: make a new optimizer to change it"
                )

    @property
    def rule(self) -> Rule:
        """What moves it; vectors are moved by AdamW where the group's rule is for matrices."""
        return RULES[self.rule_name]

    @property
    def phase(self) -> float:
        """Where in a cycle its turn comes, from 0 to 1, another one for each parameter."""
        return self.index * PHASE % 1

    @property
    def row_by_row(self) -> bool:
        """Whether some rows can be moved without the others; a vector has but one, whose numbers share scales."""
        alone = self.rank is None or (self.group["lift"] == "back" and len(self.shape) == 2)
        return self.rule.row_by_row and len(self.shape) > 1 and alone and not self.across

    @property
    def across(self) -> bool:
        """Whether the rows that share a scale of the stored weight are columns here."""
        return self.transposed and isinstance(self.here(self.parameter), CodedWeight)

    @property
    def settings(self) -> dict[str, Any]:
        """What the rule listens to: its defaults, and what the group gives instead."""
        defaults = self.rule.defaults
        return {**defaults, **{name: self.group[name] for name in defaults if self.group[name] is not None}}

    def view(self, tensor: Tensor) -> Tensor:
        """The parameter, or a tensor like it, as a matrix or a stack of them; its columns are projected away."""
        tensor = self.here(tensor).detach()
        if not self.matrix_like:
            return tensor if tensor.ndim else tensor.view(1)
        if tensor.ndim > 3:  # a convolution: (out, all the rest), in the order they lie in memory
            strides = self.parameter.stride()
            tensor = tensor.permute(0, *sorted(range(1, tensor.ndim), key=lambda dim: -strides[dim])).flatten(1)
        return tensor.mT if self.transposed else tensor

    def here(self, tensor: Tensor) -> Tensor:
        """What of the parameter, or of a tensor like it, is on this rank."""
        return tensor if self.shard is None else local(tensor)

    def first(self, rows: slice | None) -> int:
        """Which row of the whole parameter the first of `rows` is, None being all that are here."""
        return (rows.start if rows else 0) + (self.shard.start if self.shard else 0)

    def allocate(self) -> dict[str, Tensor]:
        """The state: zeros, but for the seed and the step at which the first basis is sought.

        Of a parameter that is shared out, all is shared out likewise that has its first dimension: of a stack
        everything but numbers, of a matrix all but the basis.
        """
        device = self.parameter.device
        state = {"step": torch.zeros((), dtype=torch.int64)}
        state["seed"] = torch.tensor((self.group["seed"] * 1_000_003 + self.index) % 2**63, dtype=torch.int64)
        for name, shape in self.shapes.items():
            state.update(_named(name, self.codecs[name].allocate(shape, device)))
        if self.basis_codec is not None:
            state |= {"due": torch.zeros((), dtype=torch.int64), "gap": torch.zeros((), dtype=torch.int64)}
            state |= {"failures": torch.zeros(self.shape[:-2], dtype=torch.int32, device=device)}
        if self.rank is not None and self.group["lift"] != "back":
            state["length"] = torch.zeros(self.shape[:-2], device=device)
        if self.rank is not None and self.group["error_feedback"]:
            state["error"] = torch.zeros(self.shape, device=device)
        if (shard := self.shard) is not None:
            alike = {name for name in state if state[name].ndim and (shard.stacked or not name.startswith("basis"))}
            state |= {name: shard.wrap(state[name], BLOCK if self._counts_blocks(name) else 1) for name in alike}
        return state

    def bytes_of(self) -> int:
        """What `allocate` takes, by arithmetic alone."""
        total = 8 * 2 + sum(self.codecs[name].bytes_of(shape) for name, shape in self.shapes.items())
        stack = self.shape[:-2].numel() if self.matrix_like else 1
        if self.basis_codec is not None:
            total += 8 * 2 + 4 * stack
        if self.rank is not None and self.group["lift"] != "back":
            total += 4 * stack
        if self.rank is not None and self.group["error_feedback"]:
            total += 4 * self.shape.numel()
        return total

    @property
    def basis_shape(self) -> tuple[int, ...]:
        """Of Q: columns of the matrix x rank."""
        assert self.rank is not None
        return (*self.shape[:-2], self.shape[-1], self.rank)

    def is_exact(self, low: Tensor) -> bool:
        """Whether `low` is an fp32 product with an orthonormal basis; bases in 16 bits or codes are only roughly that.

        TF32 products have errors far above those of fp32, so a check for fp32 rounding would find nothing there.
        """
        if self.basis_codec is None or not self.basis_codec.dtype == low.dtype == torch.float32:
            return False
        return not low.is_cuda or torch.get_float32_matmul_precision() == "highest"

    def stored(self, state: State, name: str, rows: slice | None = None) -> tuple[Tensor, ...]:
        """A moment or the basis as it is stored: numbers, or codes and scales."""
        found = [state[name]] + ([state[name + "_scale"]] if name + "_scale" in state else [])
        return tuple(found if rows is None else [tensor[rows] for tensor in found])

    def device(self, state: State) -> torch.device:
        """Where the state is."""
        return next(state[name] for name in self.rule.moments).device

    def read(self, state: State, name: str, rows: slice | None = None) -> Tensor:
        """A moment or the basis, in fp32; changed in place it may or may not be stored: `write` it afterwards."""
        codec = self.codecs[name]
        if codec.dtype == torch.float32 and rows is None:
            return state[name]
        return codec.decode(self.stored(state, name, rows), self.shapes[name][-1])

    def write(
        self,
        state: State,
        name: str,
        numbers: Tensor,
        rows: slice | None = None,
        noise: Tensor | None = None,
    ) -> None:
        """Store a moment or the basis, codes rounded to the nearest or, with `noise`, by chance."""
        if numbers is not state[name]:
            self.codecs[name].encode_(self.stored(state, name, rows), numbers, noise)

    def noise(self, state: State, name: str, shape: torch.Size, rows: slice | None) -> Tensor | None:
        """For a moment that changes by less than a level from step to step, and so is rounded by chance."""
        if self.codecs[name].dtype == torch.float32 or self.rule.moments[name] == "signed":
            return None
        start = self.first(rows) * torch.Size(shape[1:]).numel()
        return uniform(shape, self.seed(state, salt=1 << 40) >> 31, start, self.parameter.device)

    def generator(self, state: State, salt: int, step: int | None = None) -> torch.Generator:
        """Random numbers of the parameter, its step and `salt` alone, so that a resumed run draws the same."""
        return torch.Generator(self.parameter.device).manual_seed(self.seed(state, salt, step))

    def seed(self, state: State, salt: int, step: int | None = None) -> int:
        """63 bits of the parameter, its step and `salt`."""
        step = int(state["step"]) if step is None else step
        seed = int(state["seed"]) * 0x9E3779B97F4A7C15 + step * 0xC2B2AE3D27D4EB4F + salt * 0x165667B19E3779F9
        return seed % 2**63

    def describe(self) -> str:
        """What the parameter got, in a few words."""
        words = (
            [self.rule_name] if self.rank is None else [f"{self.group['subspace']} rank {self.rank}", self.rule_name]
        )
        if self.rank is not None:
            words += [self.group["lift"]] if self.group["lift"] != "back" else []
            words += ["left"] if self.transposed else []
            if self.basis_codec is not None and self.group["basis_store"] != "fp32":
                words.append(f"basis {self.group['basis_store']}")
        return ", ".join(words + ([self.moment_store] if self.moment_store != "fp32" else []))

    def _check_rows_apart(self) -> None:
        """Refuse choices that need all rows of a matrix together, where ranks have some each."""
        if self.transposed:
            raise OptimizerError(
                f"side = {self.group['side']!r} projects away the rows of a parameter of shape "
                f"{tuple(self.parameter.shape)}, which are shared out over ranks: use side = 'right'"
            )
        if not self.rule.row_by_row:
            raise OptimizerError(
                f"rule = {self.rule_name!r} needs all rows of a parameter of shape {tuple(self.parameter.shape)}, "
                "which are shared out over ranks: use rule = 'adamw', 'sgd' or 'lion'"
            )
        assert self.shard is not None
        if self.moment_store == "int8" and len(self.shape) == 1 and self.shard.each % BLOCK:
            raise OptimizerError(
                f"store = 'int8' has a scale for every {BLOCK} numbers, and ranks have {self.shard.each} each of a "
                f"vector of {self.shard.size}: give vectors a group with store = 'fp32'"
            )

    def _counts_blocks(self, name: str) -> bool:
        """Whether a tensor of the state has a number for each block of the first dimension: the scales of a vector."""
        return len(self.shape) == 1 and name.endswith("_scale")

    def _turns(self, shape: torch.Size) -> bool:
        """Whether rows, not columns, are projected away: the matrix is then taken transposed."""
        rows, columns = shape[-2:]
        if self.group["side"] != "cheapest":
            return bool({"right": False, "left": True, "std": rows < columns}[self.group["side"]])
        assert self.rank is not None
        stack = shape[:-2].numel()

        def cost(kept: int, projected: int) -> int:
            moments = self.rule.shapes((stack, kept, self.rank or 1))
            kinds = self.rule.moments
            total = sum(codec(self.moment_store, kinds[name]).bytes_of(size) for name, size in moments.items())
            return total + (self.basis_codec.bytes_of((stack, projected, self.rank or 1)) if self.basis_codec else 0)

        return cost(columns, rows) < cost(rows, columns)


def _named(name: str, stored: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip((name, name + "_scale"), stored, strict=False))
