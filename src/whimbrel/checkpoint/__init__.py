"""Checkpoints that are complete or absent: components (tensors and JSON) under a manifest with checksums.

Names are imported on first use: listing and verifying checkpoints needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whimbrel.checkpoint.component import DirectoryStateful, Ranks, SharingPattern, StateComponent, Stateful
    from whimbrel.checkpoint.manager import CheckpointManager, Saved, best_first
    from whimbrel.checkpoint.manifest import (
        Manifest,
        checkpoint_path,
        latest_checkpoint,
        list_checkpoints,
        read_manifest,
        step_directories,
    )
    from whimbrel.checkpoint.reader import missing_components, read_component, verify_checkpoint, verify_component
    from whimbrel.checkpoint.rng import RNGState
    from whimbrel.checkpoint.serialization import pack, read_tensors, unpack, write_tensors

__all__ = [
    "CheckpointManager",
    "DirectoryStateful",
    "Manifest",
    "RNGState",
    "Ranks",
    "Saved",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "best_first",
    "checkpoint_path",
    "latest_checkpoint",
    "list_checkpoints",
    "missing_components",
    "pack",
    "read_component",
    "read_manifest",
    "read_tensors",
    "step_directories",
    "unpack",
    "verify_checkpoint",
    "verify_component",
    "write_tensors",
]

_MODULES = {
    "CheckpointManager": "manager",
    "DirectoryStateful": "component",
    "Manifest": "manifest",
    "RNGState": "rng",
    "Ranks": "component",
    "Saved": "manager",
    "SharingPattern": "component",
    "StateComponent": "component",
    "Stateful": "component",
    "best_first": "manager",
    "checkpoint_path": "manifest",
    "latest_checkpoint": "manifest",
    "list_checkpoints": "manifest",
    "missing_components": "reader",
    "pack": "serialization",
    "read_component": "reader",
    "read_manifest": "manifest",
    "read_tensors": "serialization",
    "step_directories": "manifest",
    "unpack": "serialization",
    "verify_checkpoint": "reader",
    "verify_component": "reader",
    "write_tensors": "serialization",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
