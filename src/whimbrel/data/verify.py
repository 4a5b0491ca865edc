"""Verification of prepared shards: header, token ids, sha256 from the manifest, and the tokenizer next to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from whimbrel.base.errors import DataError
from whimbrel.base.files import sha256_file
from whimbrel.data.manifest import MANIFEST_FILE, Manifest, read_manifest
from whimbrel.data.shards import read_shard
from whimbrel.tokenization import load_tokenizer
from whimbrel.tokenization.tokenizer import TOKENIZER_FILE

__all__ = ["Finding", "verify_shards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result for one file."""

    file: str
    """Name within the directory."""
    tokens: int = 0
    """Number of tokens, if the file is a valid shard."""
    error: str | None = None
    """What is wrong with the file; None if it is valid."""


def verify_shards(directory: str | os.PathLike[str]) -> Iterator[Finding]:
    """Read all shards of a directory completely. Yields one finding per shard, and one per problem of other files."""
    root = Path(directory)
    manifest = read_manifest(root)
    files = sorted(path.name for path in root.glob("[!.]*.bin"))
    listed = [] if manifest is None else [shard.file for shard in manifest.shards]
    if not files and not listed:
        raise DataError(f"{root} has no token shards (*.bin): create them with `whimbrel prepare`")
    if manifest is not None and manifest.resume is not None:
        unfinished = f"{root} is not fully prepared: rerun the same `whimbrel prepare` command to finish it"
        yield Finding(file=MANIFEST_FILE, error=unfinished)
    if manifest is not None and (wrong := _check_tokenizer(root, manifest)) is not None:
        yield Finding(file=TOKENIZER_FILE, error=wrong)
    for name in sorted({*files, *listed}):
        try:
            yield Finding(file=name, tokens=_check_shard(root / name, manifest))
        except DataError as error:
            yield Finding(file=name, error=str(error))


def _check_tokenizer(root: Path, manifest: Manifest) -> str | None:
    """The error message if `tokenizer.json` is not the tokenizer that the shards were prepared with."""
    file = root / TOKENIZER_FILE
    if not file.is_file():
        return f"{file} is missing: restore the tokenizer that the shards were prepared with"
    try:
        fingerprint = load_tokenizer(file).fingerprint
    except DataError as error:
        return str(error)
    if fingerprint == manifest.tokenizer.fingerprint:
        return None
    return f"{file} is not the tokenizer of these shards (its fingerprint differs from {MANIFEST_FILE}): restore it"


def _check_shard(path: Path, manifest: Manifest | None) -> int:
    """The number of tokens. Raises DataError if the shard is damaged or differs from the manifest."""
    if manifest is None:
        return len(read_shard(path))
    record = next((shard for shard in manifest.shards if shard.file == path.name), None)
    if record is None:
        raise DataError(f"{path} is not listed in {MANIFEST_FILE}: move it to another directory")
    tokens = read_shard(path, manifest.tokenizer.vocab_size)
    if len(tokens) != record.tokens:
        raise DataError(f"{path} has {len(tokens):,} tokens, {MANIFEST_FILE} says {record.tokens:,}: prepare it again")
    if record == manifest.shards_of(record.split)[0] and tokens[0] != manifest.tokenizer.eot_id:
        eot_id = manifest.tokenizer.eot_id
        raise DataError(f"{path} starts with token {tokens[0]}, expected end-of-text ({eot_id})")
    if sha256_file(path) != record.sha256:
        raise DataError(
            f"{path} was changed since it was written (sha256 differs from {MANIFEST_FILE}): prepare it again"
        )
    return len(tokens)
