"""All shards of a split as one cyclic stream of tokens, memory-mapped and checked before the first read."""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import os
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whimbrel.base.errors import DataError
from whimbrel.base.files import sha256_file
from whimbrel.data.manifest import MANIFEST_FILE, SPLITS, Manifest, read_manifest
from whimbrel.data.shards import check_ids, read_header, read_shard

__all__ = ["TokenStream", "has_split", "open_stream", "split_files"]

DEFAULT_EOT = {2: 50256, 4: 128000}
"""The token that starts a document in shards without a manifest, by bytes per token: GPT-2's, Llama 3's."""
MAX_MAPPED = 512
"""Maximum number of mapped shards, lower under a low open-file limit: each map keeps a file descriptor open."""
SPLIT_NAME = re.compile(r"(?:^|[_.-])(train|val|valid|validation)(?:[_.-]\d+)*\.bin", re.IGNORECASE)

logger = logging.getLogger(__name__)


class TokenStream:
    """`len(stream)` tokens, repeated forever.

    Shards are mapped on first read and unmapped in least-recently-used order, so that a corpus with many shards needs
    few file descriptors. `digests`, one per shard, are checked when a shard is first read.
    """

    def __init__(self, paths: list[Path], vocab_size: int | None, digests: list[str] | None = None) -> None:
        self.paths = paths
        self.vocab_size = vocab_size
        headers = [read_header(path) for path in paths]
        self.dtype: np.dtype[Any] = headers[0].dtype
        for path, header in zip(paths, headers, strict=True):
            if header.dtype != self.dtype:
                raise DataError(
                    f"{path} has {header.dtype} tokens, but {paths[0]} has {self.dtype}: keep one dtype per folder"
                )
        self.lengths = [header.tokens for header in headers]
        self._ends = list(itertools.accumulate(self.lengths))
        self._unverified = dict(enumerate(digests or ()))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MAX_MAPPED if soft == resource.RLIM_INFINITY else max(1, min(MAX_MAPPED, soft // 4))
        self.shard = functools.lru_cache(most)(self._open_shard)
        """The tokens of the shard at an index."""

    def __len__(self) -> int:
        return self._ends[-1]

    def copy(self, start: int, out: NDArray[Any]) -> None:
        """Fill `out` with the tokens from `start` on, across shards and around the end."""
        start, filled = start % len(self), 0
        while filled < len(out):
            index = bisect.bisect_right(self._ends, start)
            place = start - self._ends[index] + self.lengths[index]
            piece = self.shard(index)[place : place + len(out) - filled]
            if self.vocab_size is not None:
                check_ids(piece, self.vocab_size, self.paths[index], place)
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            start = (start + len(piece)) % len(self)

    def _open_shard(self, index: int) -> NDArray[Any]:
        path = self.paths[index]
        tokens = read_shard(path).view(np.ndarray)
        if len(tokens) != self.lengths[index]:
            raise DataError(f"{path} changed while it was read: {len(tokens):,} tokens, before {self.lengths[index]:,}")
        expected = self._unverified.get(index)
        if expected is not None and sha256_file(path) != expected:
            raise DataError(
                f"{path} was changed since it was written (sha256 differs from {MANIFEST_FILE}): prepare it again"
            )
        self._unverified.pop(index, None)
        return tokens


def open_stream(
    data_root: str | os.PathLike[str],
    split: str,
    vocab_size: int | None = None,
    eot_id: int | None = None,
    *,
    verify: bool = False,
) -> tuple[TokenStream, int]:
    """The stream of a split and its end-of-text token. Arguments that are None are taken from the manifest.

    `verify` compares each shard with the manifest's sha256 when it is first read.
    """
    root = Path(data_root)
    paths, manifest = split_files(root, split), read_manifest(root)
    if manifest is None:
        if verify:
            raise DataError(f"cannot verify {root}: it has no {MANIFEST_FILE} with hashes; turn data.verify off")
        _warn_unchecked(root)
        stream = TokenStream(paths, vocab_size)
        return stream, DEFAULT_EOT[stream.dtype.itemsize] if eot_id is None else eot_id
    _check_against(manifest, root, split, paths)
    known, records = manifest.tokenizer, manifest.of_split(split)
    if eot_id is not None and eot_id != known.eot_id:
        raise DataError(f"expected eot_id={known.eot_id} as {root / MANIFEST_FILE} says, got {eot_id}: leave it out")
    vocab_size = known.vocab_size if vocab_size is None else vocab_size
    stream = TokenStream(paths, vocab_size, [record.sha256 for record in records] if verify else None)
    for record, tokens in zip(records, stream.lengths, strict=True):
        if record.tokens != tokens:
            held = f"{root / record.file} holds {tokens:,} tokens"
            raise DataError(f"{held}, {MANIFEST_FILE} says {record.tokens:,}: prepare it again")
    if (first := stream.shard(0)[0]) != known.eot_id:
        raise DataError(f"{paths[0]} starts with token {first}, expected end-of-text ({known.eot_id})")
    return stream, known.eot_id


@functools.cache
def _warn_unchecked(root: Path) -> None:
    """Say once for each directory that it has no manifest."""
    logger.warning("%s has no %s: its shards cannot be checked against one another", root, MANIFEST_FILE)


def has_split(root: Path, split: str) -> bool:
    """Whether a folder contains shards with `split` in their names."""
    return root.is_dir() and any(_split_of(path) == split for path in root.glob("[!.]*.bin"))


def split_files(root: Path, split: str) -> list[Path]:
    """The shard files of a split, in stream order.

    The split is the last word of the name before its number: `x_train_000001.bin`, `x_val.bin`. If no file name
    contains a split, all files are training data.
    """
    if split not in SPLITS:
        raise DataError(f"expected a split of {', '.join(SPLITS)}, got '{split}'")
    if not root.is_dir():
        raise DataError(f"no directory {root}: give a folder of token shards, which `whimbrel prepare` makes")
    every = {path: _split_of(path) for path in sorted(root.glob("[!.]*.bin"))}
    unnamed = [path for path, found in every.items() if found is None]
    if unnamed and len(unnamed) < len(every):
        raise DataError(f"cannot tell the split of {unnamed[0]}: rename it to *_train_*.bin or *_val_*.bin, or move it")
    chosen = [path for path, found in every.items() if found == split or (unnamed and split == "train")]
    if not chosen:
        flag = " --val or --val-tokens" if split == "val" else ""
        raise DataError(f"{root} holds no {split} shards (*_{split}_*.bin): make them with `whimbrel prepare`{flag}")
    return chosen


def _split_of(path: Path) -> str | None:
    found = SPLIT_NAME.search(path.name)
    return None if found is None else "train" if found.group(1).lower() == "train" else "val"


def _check_against(manifest: Manifest, root: Path, split: str, paths: list[Path]) -> None:
    if manifest.resume is not None:
        raise DataError(f"the preparation of {root} is unfinished: run the same `whimbrel prepare` again to finish it")
    listed, found = [shard.file for shard in manifest.of_split(split)], [path.name for path in paths]
    for name in listed:
        if name not in found:
            raise DataError(f"{root / name} is missing but listed in {MANIFEST_FILE}: restore it or prepare again")
    for name in found:
        if name not in listed:
            raise DataError(f"{root / name} is not listed in {MANIFEST_FILE}: move it to a folder of its own")
