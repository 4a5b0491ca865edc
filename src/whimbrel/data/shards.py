"""Token shards: the file format, writing a split as shards of equal size, reading a split as one stream, verification.

A shard is a header of 256 int32 values, `[magic, version, num_tokens, 0...]`, followed by the tokens: the format of
llm.c and modded-nanogpt.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whimbrel.base.errors import DataError
from whimbrel.base.files import atomic_file, sha256_file
from whimbrel.data.manifest import MANIFEST_FILE, SPLITS, Manifest, ShardRecord, ShardSettings, read_manifest
from whimbrel.tokenization import load_tokenizer
from whimbrel.tokenization.tokenizer import TOKENIZER_FILE

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

__all__ = [
    "HEADER_BYTES",
    "MAX_TOKENS",
    "FileCheck",
    "Header",
    "ShardWriter",
    "TokenStream",
    "has_split",
    "open_stream",
    "read_header",
    "read_shard",
    "split_files",
    "verify_shards",
    "write_shard",
]

HEADER_INTS, HEADER_BYTES = 256, 1024
FORMATS: dict[np.dtype[Any], tuple[int, int]] = {np.dtype(np.uint16): (20240520, 1), np.dtype(np.uint32): (20240801, 7)}
"""Magic number and version of the header, by token dtype."""
MAX_TOKENS = 2**31 - 1
"""Maximum number of tokens in a shard: the header stores the count as int32."""
WRITE_SLACK = 1 << 20
"""Tokens of buffer beyond a full shard, for the rest of a batch; the buffer grows if a document needs more."""
DEFAULT_EOT = {2: 50256, 4: 128000}
"""The token that starts a document in shards without a manifest, by bytes per token: GPT-2's, Llama 3's."""
MAX_MAPPED_SHARDS = 512
"""Maximum number of memory-mapped shards, reduced for a low open-file limit: each keeps a file descriptor open."""
SPLIT_NAME = re.compile(r"(?:^|[_.-])(train|val|valid|validation)(?:[_.-]\d+)*\.bin", re.IGNORECASE)

logger = logging.getLogger(__name__)


class Header(NamedTuple):
    """A shard's header, checked against the file size."""

    dtype: np.dtype[Any]
    tokens: int


def write_shard(path: str | os.PathLike[str], tokens: NDArray[Any]) -> None:
    """Write 1-D uint16 or uint32 `tokens` as one shard, atomically."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or tokens.dtype not in FORMATS:
        raise DataError(
            f"cannot write {path}: expected 1-D uint16 or uint32 tokens, got {tokens.ndim}-D {tokens.dtype}"
        )
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise DataError(f"cannot write {path}: expected 1 to {MAX_TOKENS:,} tokens, got {len(tokens):,}")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = *FORMATS[tokens.dtype], len(tokens)
    with atomic_file(path) as file:
        file.write(header.tobytes())
        file.write(np.ascontiguousarray(tokens, dtype=tokens.dtype.newbyteorder("<")).data)


def read_header(path: str | os.PathLike[str]) -> Header:
    """The dtype and number of tokens of a shard. Raises DataError if the file is not a complete shard."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # opening a pipe would block
            raise DataError(f"expected a shard file, got {path}, which is not a regular file: remove or move it")
        with open(path, "rb") as file:
            raw, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"cannot read shard {path}: {error.strerror}") from error
    if len(raw) < HEADER_BYTES:
        raise DataError(f"{path} is not a token shard: {size} bytes, but the header alone has {HEADER_BYTES}")
    magic, version, count = (int(number) for number in np.frombuffer(raw, dtype="<i4")[:3])
    dtype = next((dtype for dtype, (known, _) in FORMATS.items() if known == magic), None)
    if dtype is None:
        expected = " or ".join(str(known) for known, _ in FORMATS.values())
        raise DataError(f"{path} is not a token shard: magic number {magic}, expected {expected}; remove or rename it")
    if version != FORMATS[dtype][1]:
        raise DataError(f"{path} has shard version {version}, expected {FORMATS[dtype][1]} for magic number {magic}")
    if count < 1:
        raise DataError(f"{path} is an empty shard: its header says {count} tokens; remove it or prepare it again")
    if size != HEADER_BYTES + count * dtype.itemsize:
        num_tokens = (size - HEADER_BYTES) / dtype.itemsize
        fault = "truncated" if num_tokens < count else "longer than its header says"
        raise DataError(f"{path} is {fault}: the header says {count:,} tokens, the file has {num_tokens:,g}")
    return Header(dtype.newbyteorder("<"), count)


def read_shard(path: str | os.PathLike[str], vocab_size: int | None = None) -> NDArray[Any]:
    """Memory-map the tokens of a shard read-only. Checks header and size, and with `vocab_size` every token id."""
    dtype, count = read_header(path)
    try:
        tokens = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,))
    except OSError as error:
        raise DataError(f"cannot map shard {path}: {error.strerror}") from error
    if vocab_size is not None:
        for start in range(0, count, 1 << 24):
            _check_ids(tokens[start : start + (1 << 24)], vocab_size, Path(path), start)
    return tokens


def _check_ids(tokens: NDArray[Any], vocab_size: int, path: Path, start: int) -> None:
    """Raise for ids outside the vocabulary. `start` is the offset of `tokens` in the shard `path`."""
    if int(tokens.max()) >= vocab_size:
        offset = int(np.argmax(tokens >= vocab_size))
        raise DataError(
            f"{path} has token id {int(tokens[offset])} at token {start + offset:,}, but the vocabulary has "
            f"{vocab_size} ids: prepare the text again with this model's tokenizer"
        )


class ShardWriter:
    """Buffers the tokens of a split and writes them as shards of equal size.

    The last shard may be short. A later `write` extends it under the same name, so shards only ever grow at the end:
    the records of an older manifest still describe a prefix of the files.
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
        self._buffer = np.empty(self._shard_size + WRITE_SLACK, dtype=dtype)
        self._filled = 0
        self.written: set[Path] = set()
        """Files that this run created, including partly written ones."""
        self._full_shards = [record for record in records if record.tokens == self._shard_size]
        for record in records[len(self._full_shards) :]:
            tokens = read_shard(directory / record.file)
            if len(tokens) < record.tokens:
                raise DataError(f"{directory / record.file} is shorter than the manifest says: remove the directory")
            self.add(tokens[: record.tokens])

    @property
    def tokens(self) -> int:
        """Number of tokens added, including earlier runs."""
        return len(self._full_shards) * self._shard_size + self._filled

    @property
    def full(self) -> bool:
        """Whether the buffer contains at least one full shard."""
        return self._filled >= self._shard_size

    def add(self, tokens: NDArray[Any]) -> None:
        """Append `tokens` to the buffer."""
        end = self._filled + len(tokens)
        if end > len(self._buffer):
            extra = np.empty(len(tokens) + WRITE_SLACK, tokens.dtype)
            self._buffer = np.concatenate((self._buffer[: self._filled], extra))
        self._buffer[self._filled : end] = tokens
        self._filled = end

    def documents(self, eot_id: int) -> list[NDArray[Any]]:
        """The documents added, including earlier runs."""
        shards = (read_shard(self._directory / record.file) for record in self._full_shards)
        tokens = np.concatenate((*shards, self._buffer[: self._filled]))
        return np.split(tokens, np.flatnonzero(tokens == eot_id))[1:]

    def write(self) -> tuple[ShardRecord, ...]:
        """Write all buffered tokens, the rest as a short shard. Returns the records of all shards so far."""
        start = 0
        while self._filled - start >= self._shard_size:
            self._full_shards.append(self._write(self._buffer[start : start + self._shard_size]))
            start += self._shard_size
        rest = self._buffer[start : self._filled].copy()
        self._filled = len(rest)
        self._buffer[: len(rest)] = rest
        return (*self._full_shards, self._write(rest)) if len(rest) else tuple(self._full_shards)

    def _write(self, tokens: NDArray[Any]) -> ShardRecord:
        path = self._directory / f"{self._name}_{self._split}_{len(self._full_shards):06d}.bin"
        self.written.add(path)
        write_shard(path, tokens)
        return ShardRecord(file=path.name, split=self._split, tokens=len(tokens), sha256=sha256_file(path))


class TokenStream:
    """The shards of a split as one endless, memory-mapped array of tokens; `len(stream)` is one epoch.

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
                    f"{path} has {header.dtype} tokens, but {paths[0]} has {self.dtype}: use one dtype per directory"
                )
        self.lengths = [header.tokens for header in headers]
        self._ends = list(itertools.accumulate(self.lengths))
        self._unverified = dict(enumerate(digests or ()))
        max_mapped = MAX_MAPPED_SHARDS
        if resource is not None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft != resource.RLIM_INFINITY:
                max_mapped = max(1, min(MAX_MAPPED_SHARDS, soft // 4))
        self.shard = functools.lru_cache(max_mapped)(self._open_shard)
        """`shard(i)`: the memory-mapped tokens of shard i; least recently used maps are closed."""

    def __len__(self) -> int:
        return self._ends[-1]

    def copy(self, start: int, out: NDArray[Any]) -> None:
        """Fill `out` with the tokens starting at `start`, across shards and wrapping around at the end."""
        start, filled = start % len(self), 0
        while filled < len(out):
            index = bisect.bisect_right(self._ends, start)
            offset = start - self._ends[index] + self.lengths[index]
            tokens = self.shard(index)[offset : offset + len(out) - filled]
            if self.vocab_size is not None:
                _check_ids(tokens, self.vocab_size, self.paths[index], offset)
            out[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
            start = (start + len(tokens)) % len(self)

    def _open_shard(self, index: int) -> NDArray[Any]:
        path = self.paths[index]
        tokens = read_shard(path).view(np.ndarray)
        if len(tokens) != self.lengths[index]:
            raise DataError(
                f"{path} changed while it was being read: expected {self.lengths[index]:,} tokens, got {len(tokens):,}"
            )
        if index in self._unverified:
            _check_sha256(path, self._unverified[index])
            del self._unverified[index]
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
            raise DataError(f"cannot verify {root}: it has no {MANIFEST_FILE} with hashes; set data.verify=false")
        _warn_no_manifest(root)
        stream = TokenStream(paths, vocab_size)
        return stream, DEFAULT_EOT[stream.dtype.itemsize] if eot_id is None else eot_id
    _check_files(manifest, root, split, paths)
    recorded, records = manifest.tokenizer, manifest.shards_of(split)
    if eot_id is not None and eot_id != recorded.eot_id:
        raise DataError(f"expected eot_id={recorded.eot_id} as in {root / MANIFEST_FILE}, got {eot_id}: omit it")
    vocab_size = recorded.vocab_size if vocab_size is None else vocab_size
    stream = TokenStream(paths, vocab_size, [record.sha256 for record in records] if verify else None)
    for record, tokens in zip(records, stream.lengths, strict=True):
        _check_count(root / record.file, tokens, record)
    _check_first_token(paths[0], stream.shard(0), recorded.eot_id)
    return stream, recorded.eot_id


@functools.cache
def _warn_no_manifest(root: Path) -> None:
    """Warn once per directory that it has no manifest."""
    logger.warning("%s has no %s: its shards are used without verification", root, MANIFEST_FILE)


def has_split(root: Path, split: str) -> bool:
    """Whether a directory contains shards with `split` in their names."""
    return root.is_dir() and any(_parse_split(path) == split for path in root.glob("[!.]*.bin"))


def split_files(root: Path, split: str) -> list[Path]:
    """The shard files of a split, in stream order.

    The split is the last word of the name before its number: `x_train_000001.bin`, `x_val.bin`. If no file name
    contains a split, all files are training data.
    """
    if split not in SPLITS:
        raise DataError(f"expected split {' or '.join(SPLITS)}, got '{split}'")
    if not root.is_dir():
        raise DataError(
            f"no such directory: {root}; create token shards with `whimbrel prepare`, or train on text with `whimbrel "
            "quickstart`"
        )
    splits = {path: _parse_split(path) for path in sorted(root.glob("[!.]*.bin"))}
    unnamed = [path for path, found in splits.items() if found is None]
    if unnamed and len(unnamed) < len(splits):
        raise DataError(
            f"expected *_train_*.bin and *_val_*.bin in {root}, got {unnamed[0].name}: rename it or move it away"
        )
    chosen = [path for path, found in splits.items() if found == split or (unnamed and split == "train")]
    if not chosen:
        flag = " --val or --val-tokens" if split == "val" else ""
        raise DataError(f"{root} has no {split} shards (*_{split}_*.bin): create them with `whimbrel prepare`{flag}")
    return chosen


def _parse_split(path: Path) -> str | None:
    match = SPLIT_NAME.search(path.name)
    return None if match is None else "train" if match[1].lower() == "train" else "val"


def _check_files(manifest: Manifest, root: Path, split: str, paths: list[Path]) -> None:
    """Raise unless the files of a split are exactly those in the manifest."""
    if manifest.resume is not None:
        raise DataError(_incomplete(root))
    listed, found = [shard.file for shard in manifest.shards_of(split)], [path.name for path in paths]
    for name in listed:
        if name not in found:
            raise DataError(f"{root / name} is missing but listed in {MANIFEST_FILE}: restore it or prepare again")
    for name in found:
        if name not in listed:
            raise DataError(f"{root / name} is not listed in {MANIFEST_FILE}: move it to another directory")


def _incomplete(root: Path) -> str:
    return f"{root} is not fully prepared: rerun the same `whimbrel prepare` command to finish it"


# Verification: header, token ids, sha256 from the manifest, and the tokenizer next to the shards.


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCheck:
    """The result for one file."""

    file: str
    """Name within the directory."""
    tokens: int = 0
    """Number of tokens, if the file is a valid shard."""
    error: str | None = None
    """What is wrong with the file; None if it is valid."""


def verify_shards(directory: str | os.PathLike[str]) -> Iterator[FileCheck]:
    """Read all shards of a directory completely. Yields one result per shard, and one per problem with other files."""
    root = Path(directory)
    manifest = read_manifest(root)
    files = sorted(path.name for path in root.glob("[!.]*.bin"))
    listed = [] if manifest is None else [shard.file for shard in manifest.shards]
    if not files and not listed:
        raise DataError(f"{root} has no token shards (*.bin): create them with `whimbrel prepare`")
    if manifest is not None and manifest.resume is not None:
        yield FileCheck(file=MANIFEST_FILE, error=_incomplete(root))
    if manifest is not None and (message := _check_tokenizer(root, manifest)) is not None:
        yield FileCheck(file=TOKENIZER_FILE, error=message)
    for name in sorted({*files, *listed}):
        try:
            yield FileCheck(file=name, tokens=_verify_shard(root / name, manifest))
        except DataError as error:
            yield FileCheck(file=name, error=str(error))


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


def _verify_shard(path: Path, manifest: Manifest | None) -> int:
    """The number of tokens. Raises DataError if the shard is damaged or differs from the manifest."""
    if manifest is None:
        return len(read_shard(path))
    record = next((shard for shard in manifest.shards if shard.file == path.name), None)
    if record is None:
        raise DataError(f"{path} is not listed in {MANIFEST_FILE}: move it to another directory")
    tokens = read_shard(path, manifest.tokenizer.vocab_size)
    _check_count(path, len(tokens), record)
    if record == manifest.shards_of(record.split)[0]:
        _check_first_token(path, tokens, manifest.tokenizer.eot_id)
    _check_sha256(path, record.sha256)
    return len(tokens)


# Checks of a shard against the manifest


def _check_count(path: Path, tokens: int, record: ShardRecord) -> None:
    if tokens != record.tokens:
        raise DataError(
            f"{path} has {tokens:,} tokens, expected {record.tokens:,} from {MANIFEST_FILE}: prepare it again"
        )


def _check_first_token(path: Path, tokens: NDArray[Any], eot_id: int) -> None:
    if tokens[0] != eot_id:
        raise DataError(f"{path} starts with token {tokens[0]}, expected end-of-text ({eot_id})")


def _check_sha256(path: Path, expected: str) -> None:
    if sha256_file(path) != expected:
        raise DataError(
            f"{path} has changed since it was written (sha256 differs from {MANIFEST_FILE}): prepare it again"
        )
