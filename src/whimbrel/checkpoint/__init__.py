"""Atomic checkpoints: components (tensors and JSON) described by a manifest with checksums.

Names are imported on first use: listing and verifying checkpoints needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whimbrel.base import lazy_exports

if TYPE_CHECKING:
    from whimbrel.checkpoint.component import (
        DirectoryStateful,
        RNGState,
        SharingPattern,
        StateComponent,
        Stateful,
    )
    from whimbrel.checkpoint.manager import CheckpointManager, SavedCheckpoint, rank_by_metric
    from whimbrel.checkpoint.manifest import (
        Manifest,
        checkpoint_path,
        latest_checkpoint,
        list_checkpoints,
        missing_components,
        read_manifest,
        step_directories,
        verify_checkpoint,
        verify_component,
    )
    from whimbrel.checkpoint.serialization import pack, read_component, read_tensors, unpack, write_tensors
    from whimbrel.checkpoint.sharded import SavedTensor, read_full_state

__all__ = [
    "CheckpointManager",
    "DirectoryStateful",
    "Manifest",
    "RNGState",
    "SavedCheckpoint",
    "SavedTensor",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "checkpoint_path",
    "latest_checkpoint",
    "list_checkpoints",
    "missing_components",
    "pack",
    "rank_by_metric",
    "read_component",
    "read_full_state",
    "read_manifest",
    "read_tensors",
    "step_directories",
    "unpack",
    "verify_checkpoint",
    "verify_component",
    "write_tensors",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "component": ["DirectoryStateful", "RNGState", "SharingPattern", "StateComponent", "Stateful"],
        "manager": ["CheckpointManager", "SavedCheckpoint", "rank_by_metric"],
        "manifest": [
            "Manifest",
            "checkpoint_path",
            "latest_checkpoint",
            "list_checkpoints",
            "missing_components",
            "read_manifest",
            "step_directories",
            "verify_checkpoint",
            "verify_component",
        ],
        "sharded": ["SavedTensor", "read_full_state"],
        "serialization": ["pack", "read_component", "read_tensors", "unpack", "write_tensors"],
    },
)
