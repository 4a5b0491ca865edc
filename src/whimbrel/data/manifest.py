"""`manifest.json` beside the shards: what they were made from, how, and how many tokens each holds."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from whimbrel.base.errors import DataError
from whimbrel.base.files import atomic_file, parse_json
from whimbrel.config import build

__all__ = [
    "MANIFEST_FILE",
    "Manifest",
    "ResumePoint",
    "SHARD_SIZE",
    "SPLITS",
    "ShardRecord",
    "ShardSettings",
    "SourceRecord",
    "TokenizerRecord",
    "read_manifest",
    "write_manifest",
]

MANIFEST_FILE = "manifest.json"
SPLITS = ("train", "val")
SHARD_SIZE = 100_000_000
"""Tokens in a full shard where no other number is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRecord:
    """The tokenizer that made the shards, as far as a reader must know it."""

    fingerprint: str
    """Hash of everything that decides an id."""
    vocab_size: int
    """Ids run from 0 to one less."""
    eot_id: int
    """The token that opens every document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """One file (or hub dataset) that was read."""

    role: str
    """What it was read for: train or val."""
    name: str
    """Its name within the source."""
    size: int
    """Bytes; 0 for a hub dataset."""
    sha256: str
    """Hash of its first and last 64 KiB, enough to notice another file under the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """Everything besides text and tokenizer that decides a byte of the shards."""

    name: str
    """What the shard files are called."""
    shard_size: int
    """Tokens in a full shard."""
    total_tokens: int | None = None
    """Training tokens to write; None for all."""
    val_tokens: int = 0
    """Tokens to hold out of the source, in whole documents."""
    val_share: float = 0.0
    """Share of documents, by hash, from which those are taken."""
    text_key: str = "text"
    """Column or key that holds a document."""
    separator: str | None = None
    """What parts the documents of a text file; None where each file is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One shard file."""

    file: str
    """Name within the directory."""
    split: str
    """Its split: train or val."""
    tokens: int
    """How many tokens it holds."""
    sha256: str
    """Hash of the whole file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The first batch of documents that no shard holds yet."""

    source: int
    """Index into the sources."""
    batch: int
    """Batch within that source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The record of one prepared directory."""

    tool: str
    """Name and version of the program that wrote the shards."""
    tokenizer: TokenizerRecord
    """The tokenizer."""
    sources: tuple[SourceRecord, ...]
    """Every file read, in order."""
    settings: ShardSettings
    """How the shards were cut."""
    shards: tuple[ShardRecord, ...] = ()
    """Every shard, in stream order within its split."""
    documents: int = 0
    """Documents that were read."""
    resume: ResumePoint | None = None
    """Where an unfinished preparation goes on; None once all is written."""

    def of_split(self, split: str) -> tuple[ShardRecord, ...]:
        """The shards of one split, in stream order."""
        return tuple(shard for shard in self.shards if shard.split == split)

    def tokens(self, split: str) -> int:
        """How many tokens a split has."""
        return sum(shard.tokens for shard in self.of_split(split))


def write_manifest(directory: str | os.PathLike[str], manifest: Manifest) -> None:
    """Write `manifest.json`, whole or not at all."""
    with atomic_file(Path(directory) / MANIFEST_FILE, "w") as file:
        file.write(json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")


def read_manifest(directory: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of a prepared directory; None where there is none."""
    path = Path(directory) / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        manifest = build(Manifest, dict(parse_json(path.read_bytes())))
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a manifest of this program: {error}") from error
    for shard in manifest.shards:
        if Path(shard.file).name != shard.file or shard.split not in SPLITS or shard.tokens < 1:
            raise DataError(f"{path} is not a manifest of this program: it lists {shard}")
    return manifest
