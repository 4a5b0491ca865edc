"""Text to token shards to batches; conversations to packed rows. Names are imported on first use, few need torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whimbrel.base import lazy_exports

if TYPE_CHECKING:
    from whimbrel.data.conversations import ConversationReader
    from whimbrel.data.loader import TokenDataLoader, document_ids
    from whimbrel.data.manifest import Manifest, read_manifest
    from whimbrel.data.packing import PackedRows, PaddedSamples, tokenize_samples
    from whimbrel.data.shards import read_shard, write_shard

__all__ = [
    "ConversationReader",
    "Manifest",
    "PackedRows",
    "PaddedSamples",
    "TokenDataLoader",
    "document_ids",
    "read_manifest",
    "read_shard",
    "tokenize_samples",
    "write_shard",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "conversations": ["ConversationReader"],
        "loader": ["TokenDataLoader", "document_ids"],
        "manifest": ["Manifest", "read_manifest"],
        "packing": ["PackedRows", "PaddedSamples", "tokenize_samples"],
        "shards": ["read_shard", "write_shard"],
    },
)
