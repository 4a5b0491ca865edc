"""Reading prepared shards through: header, vocabulary, manifest, and the tokenizer beside them."""

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
    """What is known of one file."""

    file: str
    """Its name."""
    tokens: int = 0
    """Tokens it holds, if it is sound."""
    fault: str | None = None
    """What is wrong with it; None if nothing."""


def verify_shards(directory: str | os.PathLike[str]) -> Iterator[Finding]:
    """Read every shard of a folder through; one finding for each, as it is read, and one for any other fault."""
    root = Path(directory)
    manifest = read_manifest(root)
    files = sorted(path.name for path in root.glob("[!.]*.bin"))
    listed = [] if manifest is None else [shard.file for shard in manifest.shards]
    if not files and not listed:
        raise DataError(f"{root} holds no token shards (*.bin): make them with `whimbrel prepare`")
    if manifest is not None and manifest.resume is not None:
        yield Finding(file=MANIFEST_FILE, fault=f"the preparation of {root} is unfinished: run it again, it goes on")
    if manifest is not None and (fault := _tokenizer_fault(root, manifest)) is not None:
        yield Finding(file=TOKENIZER_FILE, fault=fault)
    for name in sorted({*files, *listed}):
        try:
            yield Finding(file=name, tokens=_check(root / name, manifest))
        except DataError as error:
            yield Finding(file=name, fault=str(error))


def _tokenizer_fault(root: Path, manifest: Manifest) -> str | None:
    file = root / TOKENIZER_FILE
    if not file.is_file():
        return f"{file} is missing: restore the tokenizer that made the shards"
    try:
        fingerprint = load_tokenizer(file).fingerprint
    except DataError as error:
        return str(error)
    if fingerprint == manifest.tokenizer.fingerprint:
        return None
    return f"{file} did not make these shards (its fingerprint differs from {MANIFEST_FILE}): restore the one that did"


def _check(path: Path, manifest: Manifest | None) -> int:
    if manifest is None:
        return len(read_shard(path))
    record = next((shard for shard in manifest.shards if shard.file == path.name), None)
    if record is None:
        raise DataError(f"{path} is not listed in {MANIFEST_FILE}: move it to a folder of its own")
    tokens = read_shard(path, manifest.tokenizer.vocab_size)
    if len(tokens) != record.tokens:
        raise DataError(
            f"{path} holds {len(tokens):,} tokens, {MANIFEST_FILE} says {record.tokens:,}: prepare it again"
        )
    if record == manifest.of_split(record.split)[0] and tokens[0] != manifest.tokenizer.eot_id:
        eot_id = manifest.tokenizer.eot_id
        raise DataError(f"{path} opens with token {tokens[0]}, a split opens with end-of-text ({eot_id})")
    if sha256_file(path) != record.sha256:
        raise DataError(
            f"{path} was changed since it was written (sha256 differs from {MANIFEST_FILE}): prepare it again"
        )
    return len(tokens)
