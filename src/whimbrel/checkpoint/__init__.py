"""Checkpoints that are whole or absent: a folder of components (tensors + JSON) under a manifest with checksums."""

from whimbrel.checkpoint.store import (
    checkpoint_path,
    latest_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_component,
    verify_checkpoint,
    write_checkpoint,
)
from whimbrel.checkpoint.tree import pack, unpack

__all__ = [
    "checkpoint_path",
    "latest_checkpoint",
    "list_checkpoints",
    "pack",
    "prune_checkpoints",
    "read_component",
    "unpack",
    "verify_checkpoint",
    "write_checkpoint",
]
