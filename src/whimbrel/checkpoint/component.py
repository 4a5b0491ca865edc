"""What a checkpoint is made of: parts that have a state, and which ranks hold which piece of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from whimbrel.base.errors import ConfigError
from whimbrel.config import did_you_mean

__all__ = [
    "DirectoryStateful",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "check_components",
    "check_skipped",
]

LEVELS = ("none", "quick", "tensor", "full")


class Stateful(Protocol):
    """A part that can say and take over what it is."""

    def state_dict(self) -> Any:
        """Numbers, texts, tensors, and lists and dicts of them."""

    def load_state_dict(self, state: Any) -> Any:
        """Become what `state` says."""


@runtime_checkable
class DirectoryStateful(Stateful, Protocol):
    """A part with a layout of its own on disk: a folder `KEY/` takes the place of `KEY.json` and `KEY.safetensors`."""

    def save_directory(self, state: Any, folder: Path) -> None:
        """Make `folder` of `state`, which is what `state_dict` gave, in host memory; may run on another thread."""

    def load_directory(self, folder: Path) -> None:
        """Become what `folder` holds."""


class SharingPattern(Enum):
    """Who saves a component, and who loads which file of it."""

    GLOBAL = "global"
    """One state: rank 0 saves it, all load it."""
    PER_RANK = "per_rank"
    """Every rank has its own."""
    REPLICATED = "replicated"
    """Every rank has the same: rank 0 saves it, after a check where one is asked for."""
    PER_GROUP = "per_group"
    """Every process group has its own: its lowest rank saves it."""
    PER_NODE = "per_node"
    """Every machine has its own: its local rank 0 saves it."""


@dataclass(frozen=True, slots=True)
class StateComponent:
    """One part of a checkpoint. The check of a replicated one compares its tensors' names, shapes and dtypes (quick),
    their values too (tensor), or all of its state (full).
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
            raise ConfigError(f"component key '{self.key}' cannot name a file: use letters, digits, '_' and '-'")
        if self.validation_level not in LEVELS:
            raise ConfigError(
                f"component '{self.key}': validation_level '{self.validation_level}' is not one of {', '.join(LEVELS)}"
            )
        if self.validate_replication and self.sharing_pattern is not SharingPattern.REPLICATED:
            raise ConfigError(
                f"component '{self.key}' is {self.sharing_pattern.name}: only a REPLICATED one can be checked for "
                "replication"
            )
        if (self.sharing_pattern is SharingPattern.PER_GROUP) != (self.process_group_name is not None):
            raise ConfigError(f"component '{self.key}': PER_GROUP and process_group_name go together")


def check_components(components: Sequence[StateComponent], groups: Collection[str]) -> None:
    """Refuse keys that occur twice and process groups that nobody made."""
    keys = [component.key for component in components]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"component key '{twice[0]}' occurs twice: each needs its own")
    for component in components:
        name = component.process_group_name
        if name is not None and name not in groups:
            raise ConfigError(
                f"component '{component.key}': unknown process group '{name}'{did_you_mean(name, groups)}"
            )


def check_skipped(skip: Collection[str], components: Sequence[StateComponent]) -> None:
    """Refuse to leave out what does not exist or must not be left out."""
    required = {component.key: component.required for component in components}
    for key in skip:
        if key not in required:
            raise ConfigError(f"unknown component '{key}' to skip{did_you_mean(key, required)}")
        if required[key]:
            optional = sorted(key for key, needed in required.items() if not needed)
            raise ConfigError(f"component '{key}' is required; what can be skipped: {', '.join(optional) or 'nothing'}")
