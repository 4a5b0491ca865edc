"""The components of a checkpoint: `StateComponent`, which ranks write and read its files, and `RNGState`."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.config import did_you_mean
from whimbrel.distributed.world import World

__all__ = [
    "DirectoryStateful",
    "Location",
    "PartialStateful",
    "RNGState",
    "ReshardedStateful",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "check_components",
    "check_skipped",
    "locate",
]

VALIDATION_LEVELS = ("none", "quick", "tensor", "full")
NUMPY_GENERATOR = "MT19937"

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """An object whose state can be saved."""

    def state_dict(self) -> Any:
        """Nested dicts, lists and tuples of numbers, strings, bytes and tensors."""

    def load_state_dict(self, state: Any) -> Any: ...


@runtime_checkable
class DirectoryStateful(Stateful, Protocol):
    """A stateful object with its own file format: a directory `KEY/` instead of `KEY.json` and `KEY.safetensors`."""

    def save_directory(self, state: Any, directory: Path) -> None:
        """Write `state`, a copy of `state_dict()` in host memory, to `directory`. May run on another thread."""

    def load_directory(self, directory: Path) -> None:
        """Restore the state in `directory`."""


@runtime_checkable
class ReshardedStateful(Stateful, Protocol):
    """A per-rank stateful object (PER_RANK) that can resume from a checkpoint saved by a different number of ranks."""

    def load_resharded(self, saved_ranks: int, step: int) -> None:
        """Derive the state at `step`; called instead of `load_state_dict` if the rank count is not `saved_ranks`."""


@runtime_checkable
class PartialStateful(Stateful, Protocol):
    """A stateful object that a rank may need only parts of."""

    def load_parts(self, state: Any) -> None:
        """Restore a state with a `SavedTensor` instead of each tensor; called instead of `load_state_dict`."""


class SharingPattern(Enum):
    """Which ranks save a component, and which file each rank loads."""

    GLOBAL = "global"
    """One state: rank 0 saves it, all ranks load it."""
    PER_RANK = "per_rank"
    """Each rank saves and loads its own."""
    REPLICATED = "replicated"
    """The same on all ranks: rank 0 saves it, after an optional check that they agree."""
    PER_GROUP = "per_group"
    """One state per process group, saved by the group's lowest rank."""
    SHARDED = "sharded"
    """Each rank saves its parts of the tensors; any number of ranks can load them, split in any way."""
    PER_NODE = "per_node"
    """One state per machine, saved by its local rank 0."""


@dataclass(frozen=True, slots=True)
class StateComponent:
    """One part of a checkpoint, such as the model or the optimizer.

    `validate_replication` checks before a save that a REPLICATED component is equal on all ranks: `validation_level`
    "quick" compares names, shapes and dtypes of tensors, "tensor" also their values, "full" the complete state.
    """

    key: str
    stateful: Stateful
    sharing_pattern: SharingPattern
    process_group_name: str | None = None
    required: bool = True
    validate_replication: bool = False
    validation_level: str = "tensor"
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z][\w-]*", self.key) or self.key == "manifest":
            raise ConfigError(f"expected a component key with only letters, digits, '_' and '-', got '{self.key}'")
        if self.validation_level not in VALIDATION_LEVELS:
            raise ConfigError(
                f"component '{self.key}': expected a validation_level of {', '.join(VALIDATION_LEVELS)}, got "
                f"'{self.validation_level}'"
            )
        if self.validate_replication and self.sharing_pattern is not SharingPattern.REPLICATED:
            raise ConfigError(
                f"component '{self.key}': validate_replication needs REPLICATED, got {self.sharing_pattern.name}"
            )
        if (self.sharing_pattern is SharingPattern.PER_GROUP) != (self.process_group_name is not None):
            raise ConfigError(f"component '{self.key}': PER_GROUP and process_group_name must be used together")


def check_components(components: Sequence[StateComponent], groups: Collection[str]) -> None:
    """Raise for duplicate keys and unknown process groups."""
    keys = [component.key for component in components]
    if duplicates := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"duplicate component key '{duplicates[0]}'")
    for component in components:
        name = component.process_group_name
        if name is not None and name not in groups:
            hint = did_you_mean(name, groups)
            raise ConfigError(f"component '{component.key}': unknown process group '{name}'{hint}")


def check_skipped(skip: Collection[str], components: Sequence[StateComponent]) -> None:
    """Raise for keys to skip that are unknown or required."""
    required = {component.key: component.required for component in components}
    for key in skip:
        if key not in required:
            raise ConfigError(f"unknown component '{key}' to skip{did_you_mean(key, required)}")
        if required[key]:
            optional = ", ".join(sorted(key for key, needed in required.items() if not needed))
            raise ConfigError(f"component '{key}' is required and cannot be skipped (optional: {optional or 'none'})")


class Location(NamedTuple):
    """The files of a component on this rank: the file name stem, and whether this rank writes them."""

    stem: str
    is_writer: bool


def locate(component: StateComponent, world: World, groups: Mapping[str, Any]) -> Location:
    """The location of this rank's files of a component."""
    match component.sharing_pattern:
        case SharingPattern.GLOBAL | SharingPattern.REPLICATED:
            return Location(component.key, world.is_main)
        case SharingPattern.SHARDED:
            return Location(component.key, is_writer=True)
        case SharingPattern.PER_RANK:
            return Location(f"{component.key}.rank-{world.rank:05d}", is_writer=True)
        case SharingPattern.PER_NODE:
            return Location(f"{component.key}.node-{world.node:05d}", world.local_rank == 0)
        case SharingPattern.PER_GROUP:
            group = groups[str(component.process_group_name)]
            lowest = 0 if world.size == 1 else min(dist.get_process_group_ranks(group))
            return Location(f"{component.key}.group-{lowest:05d}", world.rank == lowest)


class RNGState:
    """The global RNGs of Python, NumPy and torch (CPU and all CUDA devices in use), as a checkpoint component."""

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators, as tensors and numbers."""
        version, words, gauss = random.getstate()
        numpy = np.random.get_state(legacy=False)
        if numpy["bit_generator"] != NUMPY_GENERATOR:
            raise CheckpointError(
                f"expected NumPy's global generator to be {NUMPY_GENERATOR}, got {numpy['bit_generator']}"
            )
        return {
            "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
            "numpy": {
                "key": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
                "pos": int(numpy["state"]["pos"]),
                "has_gauss": int(numpy["has_gauss"]),
                "gauss": float(numpy["gauss"]),
            },
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all generators. Warns if the number of CUDA devices differs."""
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        key = numpy["key"].numpy().astype(np.uint32)
        np.random.set_state((NUMPY_GENERATOR, key, numpy["pos"], numpy["has_gauss"], numpy["gauss"]))
        torch.set_rng_state(state["torch"])
        devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        if devices != len(state["cuda"]):
            logger.warning(
                "the checkpoint has the RNG state of %d CUDA devices, but %d are in use: random numbers on the "
                "remaining devices will differ",
                len(state["cuda"]),
                devices,
            )
        for device, saved in enumerate(state["cuda"][:devices]):
            torch.cuda.set_rng_state(saved, device)
