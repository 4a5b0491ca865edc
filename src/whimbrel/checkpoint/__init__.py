"""Checkpoints that are whole or absent: components (tensors + JSON) under a manifest with checksums."""

from whimbrel.checkpoint.component import DirectoryStateful, SharingPattern, StateComponent, Stateful
from whimbrel.checkpoint.layout import checkpoint_path, latest_checkpoint, list_checkpoints, step_folders
from whimbrel.checkpoint.manager import CheckpointManager, Saved
from whimbrel.checkpoint.manifest import Manifest, read_manifest
from whimbrel.checkpoint.ranks import Ranks
from whimbrel.checkpoint.reading import missing_components, read_component, verify_checkpoint, verify_component
from whimbrel.checkpoint.retention import best_first
from whimbrel.checkpoint.rng import RNGState
from whimbrel.checkpoint.tensors import read_tensors, write_tensors
from whimbrel.checkpoint.tree import pack, unpack

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
    "step_folders",
    "unpack",
    "verify_checkpoint",
    "verify_component",
    "write_tensors",
]
