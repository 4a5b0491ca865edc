"""`manifest.json` next to the shards: sources, tokenizer, settings, and the tokens and sha256 of each shard."""

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
    "SHARD_SIZE",
    "SPLITS",
    "Manifest",
    "ResumePoint",
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
"""Default number of tokens in a full shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRecord:
    """The tokenizer that the shards were prepared with."""

    fingerprint: str
    """Hash of everything that affects token ids."""
    vocab_size: int
    """Number of ids."""
    eot_id: int
    """The end-of-text token, which starts every document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """One file or Hub dataset that was read."""

    role: str
    """Its split: train or val."""
    name: str
    """File name (relative to the source directory), or `owner/dataset[:config]`."""
    size: int
    """Bytes; 0 for a Hub dataset."""
    sha256: str
    """Hash of the first and last 64 KiB only, to detect a different file with the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """All settings besides sources and tokenizer that affect the content of the shards."""

    name: str
    """Prefix of the shard file names."""
    shard_size: int
    """Tokens in a full shard."""
    total_tokens: int | None = None
    """Training tokens to write; None: all."""
    val_tokens: int = 0
    """Tokens to hold out for validation, in documents or parts of long ones."""
    val_share: float = 0.0
    """Share of documents, selected by hash, from which the validation documents are taken."""
    text_key: str = "text"
    """Column (parquet) or key (jsonl) of the text."""
    separator: str | None = None
    """Separator between documents in text files; None: each file is one document."""
    encoding: str = "utf-8"
    """Encoding of text and jsonl files."""
    skip_bad: bool = False
    """Whether documents that cannot be read are skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One shard file."""

    file: str
    """Name within the directory."""
    split: str
    """Its split: train or val."""
    tokens: int
    """Number of tokens."""
    sha256: str
    """Hash of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The first batch of documents that is not in a shard yet."""

    source: int
    """Index into the sources."""
    batch: int
    """Batch within that source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`."""

    tool: str
    """Name and version of the program that wrote the shards."""
    tokenizer: TokenizerRecord
    """The tokenizer that the shards were prepared with."""
    sources: tuple[SourceRecord, ...]
    """All sources, in the order they are read."""
    settings: ShardSettings
    """How the shards were prepared."""
    shards: tuple[ShardRecord, ...] = ()
    """All shards, in stream order within each split."""
    documents: int = 0
    """Number of documents read."""
    skipped: int = 0
    """Number of documents that could not be read and were skipped."""
    resume: ResumePoint | None = None
    """Where an interrupted preparation resumes; None once it is complete."""

    def shards_of(self, split: str) -> tuple[ShardRecord, ...]:
        """The shards of one split, in stream order."""
        return tuple(shard for shard in self.shards if shard.split == split)

    def tokens(self, split: str) -> int:
        """Number of tokens in a split."""
        return sum(shard.tokens for shard in self.shards_of(split))


def write_manifest(directory: str | os.PathLike[str], manifest: Manifest) -> None:
    """Write `manifest.json` atomically."""
    with atomic_file(Path(directory) / MANIFEST_FILE, "w") as file:
        file.write(json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")


def read_manifest(directory: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of a prepared directory; None if it has none. Raises DataError if it is malformed."""
    path = Path(directory) / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        manifest = build(Manifest, dict(parse_json(path.read_bytes())))
    except (OSError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a valid shard manifest: {error}") from error
    for shard in manifest.shards:
        if Path(shard.file).name != shard.file or shard.split not in SPLITS or shard.tokens < 1:
            raise DataError(f"{path} is not a valid shard manifest: it lists {shard}")
    return manifest
