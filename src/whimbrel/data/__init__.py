"""Text sources to token shards to batches. Names are imported on first use: only the loader needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whimbrel.base import lazy_exports

if TYPE_CHECKING:
    from whimbrel.data.loader import TokenDataLoader, document_ids
    from whimbrel.data.manifest import Manifest, read_manifest
    from whimbrel.data.shards import read_shard, write_shard

__all__ = ["Manifest", "TokenDataLoader", "document_ids", "read_manifest", "read_shard", "write_shard"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "loader": ["TokenDataLoader", "document_ids"],
        "manifest": ["Manifest", "read_manifest"],
        "shards": ["read_shard", "write_shard"],
    },
)
