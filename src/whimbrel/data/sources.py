"""Where documents come from: local parquet, jsonl and text files (plain, gz, zst), and datasets of the hub.

An origin yields its documents in order, in batches of bounded size, read in one thread and parsed in another.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.data.batches import MAX_SEPARATOR, Batch, check_length, jsonl_batches, parquet_batches, text_batches
from whimbrel.data.hub import HubDataset
from whimbrel.data.manifest import SourceRecord

__all__ = ["FINEWEB", "LocalFile", "Origin", "check_separator", "documents", "open_source", "source_name"]

FINEWEB = "HuggingFaceFW/fineweb:sample-10BT"
"""The source that `prepare` reads where none is named."""

KINDS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".md": "text"}
CODECS = {".gz": "gzip", ".zst": "zstd"}
EXPANSION = 3
"""Bytes of text expected in a byte of a compressed file; only sizes the share of documents to hold out."""

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
ENDS = 1 << 16


class Origin(Protocol):
    """One ordered run of documents."""

    @property
    def name(self) -> str:
        """How messages and the manifest call it."""

    def record(self, role: str) -> SourceRecord:
        """What the manifest keeps of it."""

    def text_bytes(self) -> int | None:
        """About how many bytes of text it holds; None where that is not known before reading."""

    def batches(self, text_key: str, separator: str | None, skip: int) -> Iterator[Batch]:
        """Its documents in order, without the first `skip` batches."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file on this machine; its suffixes say what it holds."""

    path: Path
    name: str
    kind: str
    codec: str | None

    def record(self, role: str) -> SourceRecord:
        """Size and a hash of both ends tell one file from another without reading it all."""
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                digest = hashlib.sha256(file.read(ENDS))
                file.seek(max(0, size - ENDS))
                digest.update(file.read(ENDS))
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from error
        return SourceRecord(role=role, name=self.name, size=size, sha256=digest.hexdigest())

    def text_bytes(self) -> int:
        """The file's size, more where it is compressed."""
        return self.path.stat().st_size * (EXPANSION if self.codec or self.kind == "parquet" else 1)

    def batches(self, text_key: str, separator: str | None, skip: int) -> Iterator[Batch]:
        """The documents of the file; what is skipped is read, which is quick, but not parsed."""
        if self.kind == "parquet":
            batches = parquet_batches(self.path, text_key)
        elif self.kind == "jsonl":
            batches = jsonl_batches(self.path, self.codec, text_key)
        else:
            batches = text_batches(self.path, self.codec, separator)
        return itertools.islice(batches, skip, None)


def open_source(source: str) -> Sequence[Origin]:
    """The origins of one source in order: a file, a folder, a glob, or `owner/dataset[:config]`.

    Folders are searched through, but for names that begin with a dot.
    """
    if not source:
        raise ConfigError(f"a source is empty: {_allowed()}")
    path = Path(source)
    if path.is_dir():
        found = [_local(file, file.relative_to(path).as_posix()) for file in _visible(path)]
        origins = [file for file in found if file is not None]
        if not origins:
            raise DataError(f"the folder {source} holds no text: put {_known_suffixes()} files there")
        return origins
    matches = [path] if path.is_file() else sorted(file for file in _expanded(source) if file.is_file())
    if matches:
        return [_named_file(file) for file in matches]
    if HUB_NAME.fullmatch(source) and _suffix_kind(path)[0] is None:
        return [HubDataset.named(source)]
    raise DataError(f"no source {source}: {_allowed()}")


def check_separator(separator: str | None, origins: Sequence[Origin]) -> None:
    """Refuse a separator that parts nothing, and a text file that is too long to go without one."""
    texts = [origin for origin in origins if isinstance(origin, LocalFile) and origin.kind == "text"]
    if separator is None:
        for file in texts:
            if not file.codec:
                check_length(file.path, file.text_bytes())
    elif not separator:
        raise ConfigError("separator='' parts nothing: give what stands between documents, or leave it out")
    elif len(separator.encode()) + separator.count("\n") > MAX_SEPARATOR:
        raise ConfigError(f"expected a separator of at most {MAX_SEPARATOR} bytes, got {len(separator.encode())}")
    elif not texts:
        raise ConfigError(f"separator={separator!r} parts text files and no source is one: leave it out")


def documents(sources: Sequence[str], text_key: str = "text", separator: str | None = None) -> Iterator[str]:
    """The texts of all documents of `sources`, in order."""
    origins = [origin for source in sources for origin in open_source(source)]
    check_separator(separator, origins)
    for origin in origins:
        for batch in origin.batches(text_key, separator, skip=0):
            for _, text in batch.documents():
                yield text


def source_name(source: str) -> str:
    """A short name for shards made from `source`: its folder, file or dataset."""
    path = Path(source)
    if glob.has_magic(source) and not path.exists():
        path = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
    plain = path.resolve().name if path.is_dir() else path.name.split(":")[0].split(".")[0]
    return re.sub(r"[\W_]+", "-", plain).strip("-") or "text"


def _visible(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    return [file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def _expanded(pattern: str) -> Iterator[Path]:
    """What a glob names, read as the shell reads it: `**` alone is any depth, beside other characters it is `*`."""
    found = glob.iglob(pattern, recursive=True)  # noqa: PTH207 (pathlib refuses `**.txt`)
    return map(Path, found if glob.has_magic(pattern) else ())


def _named_file(path: Path) -> LocalFile:
    file = _local(path, path.name)
    if file is None:
        raise ConfigError(f"{path} is of no known kind: {_known_suffixes()} are read")
    return file


def _local(path: Path, name: str) -> LocalFile | None:
    kind, codec = _suffix_kind(path)
    return None if kind is None else LocalFile(path, name, kind, codec)


def _suffix_kind(path: Path) -> tuple[str | None, str | None]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    codec = CODECS.get(suffixes[-1]) if suffixes else None
    kind = KINDS.get((suffixes[:-1] if codec else suffixes)[-1:][0]) if suffixes[bool(codec) :] else None
    return (None, None) if codec and kind == "parquet" else (kind, codec)


def _known_suffixes() -> str:
    return f"{', '.join(KINDS)} (all but .parquet also {' or '.join(CODECS)})"


def _allowed() -> str:
    return f"give a file, folder or glob of {_known_suffixes()}, or owner/dataset[:config]"
