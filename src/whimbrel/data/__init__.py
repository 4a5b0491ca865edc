"""Text sources to token shards to batches. Names are imported on first use: only the loader needs torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whimbrel.data.loader import TokenDataLoader, document_ids
    from whimbrel.data.manifest import Manifest, read_manifest
    from whimbrel.data.shards import read_shard, write_shard

__all__ = ["Manifest", "TokenDataLoader", "document_ids", "read_manifest", "read_shard", "write_shard"]

_MODULES = {
    "Manifest": "manifest",
    "TokenDataLoader": "loader",
    "document_ids": "loader",
    "read_manifest": "manifest",
    "read_shard": "shards",
    "write_shard": "shards",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
