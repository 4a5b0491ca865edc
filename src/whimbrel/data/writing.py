"""Tokens of one split into shards of equal size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whimbrel.base.errors import DataError
from whimbrel.base.files import sha256_file
from whimbrel.data.manifest import ShardRecord, ShardSettings
from whimbrel.data.shards import read_shard, write_shard

__all__ = ["ShardWriter"]

SLACK = 1 << 20
"""Room for what a batch brings after a shard is full; more is made if a document needs it."""


class ShardWriter:
    """Collects the tokens of a split and writes them when told to. The last shard may be short; later ones fill it up.

    Shards only ever grow at the end, so the records of an older manifest still name a true beginning of the files.
    """

    def __init__(
        self,
        directory: Path,
        settings: ShardSettings,
        split: str,
        dtype: np.dtype[Any],
        records: tuple[ShardRecord, ...],
    ) -> None:
        self._directory, self._name, self._split = directory, settings.name, split
        self._shard_size = settings.shard_size
        self._buffer = np.empty(self._shard_size + SLACK, dtype=dtype)
        self._filled = 0
        self.written: set[Path] = set()
        """Files that this run wrote or began to."""
        self._whole = [record for record in records if record.tokens == self._shard_size]
        for record in records[len(self._whole) :]:
            self.add(self._reopen(record))

    @property
    def tokens(self) -> int:
        """How many tokens were given so far, over all runs."""
        return len(self._whole) * self._shard_size + self._filled

    @property
    def full(self) -> bool:
        """True once there is a whole shard to write."""
        return self._filled >= self._shard_size

    def add(self, tokens: NDArray[Any]) -> None:
        """Append `tokens`, in memory."""
        end = self._filled + len(tokens)
        if end > len(self._buffer):
            self._buffer = np.concatenate((self._buffer[: self._filled], np.empty(len(tokens) + SLACK, tokens.dtype)))
        self._buffer[self._filled : end] = tokens
        self._filled = end

    def documents(self, eot_id: int) -> list[NDArray[Any]]:
        """The documents given so far, over all runs."""
        shards = (read_shard(self._directory / record.file) for record in self._whole)
        tokens = np.concatenate((*shards, self._buffer[: self._filled]))
        return np.split(tokens, np.flatnonzero(tokens == eot_id))[1:]

    def write(self) -> tuple[ShardRecord, ...]:
        """Write everything, the rest as a short shard; the records of all shards so far."""
        start = 0
        while self._filled - start >= self._shard_size:
            self._whole.append(self._write(self._buffer[start : start + self._shard_size]))
            start += self._shard_size
        rest = self._buffer[start : self._filled].copy()
        self._filled = len(rest)
        self._buffer[: len(rest)] = rest
        return (*self._whole, self._write(rest)) if len(rest) else tuple(self._whole)

    def _write(self, tokens: NDArray[Any]) -> ShardRecord:
        name = f"{self._name}_{self._split}_{len(self._whole):06d}.bin"
        self.written.add(self._directory / name)
        write_shard(self._directory / name, tokens)
        digest = sha256_file(self._directory / name)
        return ShardRecord(file=name, split=self._split, tokens=len(tokens), sha256=digest)

    def _reopen(self, record: ShardRecord) -> NDArray[Any]:
        held = read_shard(self._directory / record.file)
        if len(held) < record.tokens:
            raise DataError(
                f"{self._directory / record.file} is shorter than the manifest says: remove the folder first"
            )
        return held[: record.tokens]
