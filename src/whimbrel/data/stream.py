"""All shards of a split as one cyclic stream of tokens, memory-mapped and checked before the first read."""

from __future__ import annotations

import bisect
import functools
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whimbrel.base.errors import DataError
from whimbrel.base.logging import get_logger
from whimbrel.data.manifest import MANIFEST_FILE, SPLITS, Manifest, read_manifest
from whimbrel.data.shards import check_ids, read_shard

__all__ = ["TokenStream", "open_stream", "split_files"]

FOREIGN_OPENER = {2: 50256, 4: 128000}
"""The token that opens documents in shards of other programs, by bytes per token: GPT-2's, Llama 3's."""


class TokenStream:
    """`len(stream)` tokens that repeat for ever. Holds maps of the files, not their contents."""

    def __init__(self, paths: list[Path], vocab_size: int | None) -> None:
        self.paths = paths
        self.vocab_size = vocab_size
        self.shards = [read_shard(path).view(np.ndarray) for path in paths]
        self.dtype: np.dtype[Any] = self.shards[0].dtype
        for path, shard in zip(paths, self.shards, strict=True):
            if shard.dtype != self.dtype:
                raise DataError(
                    f"{path} holds {shard.dtype} tokens and {paths[0]} {self.dtype}: keep one type a folder"
                )
        self._ends = list(itertools.accumulate(len(shard) for shard in self.shards))

    def __len__(self) -> int:
        return self._ends[-1]

    def copy(self, start: int, out: NDArray[Any]) -> None:
        """Fill `out` with the tokens from `start` on, across shards and around the end."""
        start, filled = start % len(self), 0
        while filled < len(out):
            index = bisect.bisect_right(self._ends, start)
            shard = self.shards[index]
            place = start - self._ends[index] + len(shard)
            piece = shard[place : place + len(out) - filled]
            if self.vocab_size is not None:
                check_ids(piece, self.vocab_size, self.paths[index], place)
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            start = (start + len(piece)) % len(self)


def open_stream(
    data_root: str | os.PathLike[str], split: str, vocab_size: int | None = None, eot_id: int | None = None
) -> tuple[TokenStream, int]:
    """The stream of a split and its end-of-text token; what the arguments leave open the manifest says."""
    root = Path(data_root)
    paths, manifest = split_files(root, split), read_manifest(root)
    if manifest is not None:
        _check_against(manifest, root, split, paths)
        vocab_size = manifest.tokenizer.vocab_size if vocab_size is None else vocab_size
        eot_id = manifest.tokenizer.eot_id if eot_id is None else eot_id
    else:
        _warn_unchecked(root)
    stream = TokenStream(paths, vocab_size)
    if manifest is not None:
        for record, shard in zip(manifest.of_split(split), stream.shards, strict=True):
            if record.tokens != len(shard):
                held = f"{root / record.file} holds {len(shard):,} tokens"
                raise DataError(f"{held}, {MANIFEST_FILE} says {record.tokens:,}: prepare it again")
    eot_id = FOREIGN_OPENER[stream.dtype.itemsize] if eot_id is None else eot_id
    if stream.shards[0][0] != eot_id:
        raise DataError(f"{paths[0]} opens with token {stream.shards[0][0]}, a split opens with end-of-text ({eot_id})")
    return stream, eot_id


@functools.cache
def _warn_unchecked(root: Path) -> None:
    """Say once for each directory that it has no manifest."""
    get_logger(__name__).warning("%s has no %s: its shards cannot be checked against one another", root, MANIFEST_FILE)


def split_files(root: Path, split: str) -> list[Path]:
    """The shard files of a split, in stream order: `*_{split}_*.bin`, or every .bin where no name carries a split."""
    if split not in SPLITS:
        raise DataError(f"split '{split}' is unknown: known are {', '.join(SPLITS)}")
    if not root.is_dir():
        raise DataError(f"no directory {root}: give a folder of token shards, which `whimbrel prepare` makes")
    every = sorted(root.glob("[!.]*.bin"))
    named = [path for path in every if any(f"_{name}_" in path.name for name in SPLITS)]
    chosen = [path for path in named if f"_{split}_" in path.name] if named or split != "train" else every
    if not chosen:
        flag = " --val or --val-tokens" if split == "val" else ""
        raise DataError(f"{root} holds no {split} shards (*_{split}_*.bin): make them with `whimbrel prepare`{flag}")
    return chosen


def _check_against(manifest: Manifest, root: Path, split: str, paths: list[Path]) -> None:
    if manifest.resume is not None:
        raise DataError(f"the preparation of {root} is unfinished: run the same `whimbrel prepare` again, it goes on")
    listed, found = [shard.file for shard in manifest.of_split(split)], [path.name for path in paths]
    for name in listed:
        if name not in found:
            raise DataError(f"{root / name} is missing but listed in {MANIFEST_FILE}: restore it or prepare again")
    for name in found:
        if name not in listed:
            raise DataError(f"{root / name} is not listed in {MANIFEST_FILE}: move it to a folder of its own")
