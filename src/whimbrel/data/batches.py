"""Reading files as batches of documents: raw bytes come off the disk in order, parsing waits until a worker asks."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whimbrel.base.errors import DataError

__all__ = [
    "BATCH_DOCUMENTS",
    "Batch",
    "Documents",
    "MAX_SEPARATOR",
    "check_length",
    "jsonl_batches",
    "parquet_batches",
    "text_batches",
]

BATCH_BYTES = 1 << 20
"""Raw text in a batch, about; a longer document is a batch of its own."""
BATCH_DOCUMENTS = 64
"""Documents in a batch of a format that counts in rows."""
MOST_DOCUMENT = 1 << 28
"""Bytes of one document, 256 MiB: a document is held in memory whole and encoded by one thread."""

LINE_END = re.compile(rb"\n")
MAX_SEPARATOR = 1 << 12
"""Maximum separator length in bytes, counting each newline twice."""

Documents = list[tuple[int, str]]
"""Documents with their numbers in the file, for messages. Empty ones are left out."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Some documents of one file, in order."""

    place: str
    """The file and the word for its parts: `a.jsonl, line`; a number completes it."""
    documents: Callable[[], Documents]
    """Parses them."""
    read: float | None
    """The share of the file that lies before the next batch, for estimates; None where the size is not known."""


def parquet_batches(path: Path, text_key: str) -> Iterator[Batch]:
    """Rows of a parquet file; only the text column is read."""
    import pyarrow.parquet as pq

    place, row = f"{path}, row", 0
    with _one_line(f"{path} is not a readable parquet file"), pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if text_key not in names:
            raise DataError(
                f"{path} has no column '{text_key}': its columns are {', '.join(names)}; name one by --text-key"
            )
        for batch in file.iter_batches(BATCH_DOCUMENTS, columns=[text_key], use_threads=False):
            parse = functools.partial(_parse_column, batch.column(0), place, row)
            row += batch.num_rows
            yield Batch(place, parse, row / file.metadata.num_rows)


def jsonl_batches(path: Path, codec: str | None, text_key: str) -> Iterator[Batch]:
    """Lines of a jsonl file, one JSON object each."""
    place, line = f"{path}, line", 1
    for block, read in _blocks(path, codec, LINE_END):
        yield Batch(place, functools.partial(_parse_lines, block, place, line, text_key), read)
        line += block.count(b"\n")


def text_batches(path: Path, codec: str | None, separator: str | None) -> Iterator[Batch]:
    """A text file as one document, or as documents between `separator`s. A line end matches LF and CRLF alike."""
    place, number = f"{path}, document", 1
    mark = _separator_pattern(separator) if separator else None
    for block, read in _blocks(path, codec, mark):
        yield Batch(place, functools.partial(_parse_texts, block, place, number, mark), read)
        number += sum(1 for _ in mark.finditer(block)) if mark else 1
    if mark and number == 1:
        logging.getLogger(__name__).warning("%s does not contain the separator %r: it is one document", path, separator)


def _separator_pattern(separator: str) -> re.Pattern[bytes]:
    lines = separator.replace("\r\n", "\n").split("\n")
    return re.compile(rb"\r?\n".join(re.escape(line.encode()) for line in lines))


def check_length(path: Path, size: int) -> None:
    """Refuse a document of `path` that is longer than `MOST_DOCUMENT`."""
    if size > MOST_DOCUMENT:
        most = f"{MOST_DOCUMENT >> 20} MiB"
        raise DataError(f"{path} holds a document of more than {most}: part it (a text file by --separator)")


def _blocks(path: Path, codec: str | None, mark: re.Pattern[bytes] | None) -> Iterator[tuple[bytes, float]]:
    """The file's bytes in order with the share read so far, cut after a match of `mark`; without one, in one piece."""
    import pyarrow as pa

    held = bytearray()
    with _one_line(f"{path} is not a readable {codec or 'text'} file"), pa.OSFile(str(path)) as raw:
        file, size = pa.CompressedInputStream(raw, codec) if codec else raw, raw.size()
        while block := file.read(BATCH_BYTES):
            searched = max(0, len(held) - MAX_SEPARATOR)
            held += block
            end = max((match.end() for match in mark.finditer(held, searched)), default=0) if mark else 0
            if end:
                yield bytes(held[:end]), raw.tell() / size
                del held[:end]
            check_length(path, len(held))
    if held:
        yield bytes(held), 1.0


def _parse_column(column: Any, place: str, first: int) -> Documents:
    documents: Documents = []
    for row, value in enumerate(column, first):
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            raise DataError(f"{place} {row}: not UTF-8 at byte {error.start} of the text") from error
        if not isinstance(text, str):
            raise DataError(f"{place} {row}: the text is {type(text).__name__}, not a string; drop the row or mend it")
        if text:
            documents.append((row, text))
    return documents


def _parse_lines(block: bytes, place: str, first: int, text_key: str) -> Documents:
    documents: Documents = []
    for number, line in enumerate(block.split(b"\n"), first):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[text_key]
        except UnicodeDecodeError as error:
            raise DataError(f"{place} {number}: not UTF-8 at byte {error.start} of the line") from error
        except ValueError as error:
            raise DataError(f"{place} {number}: not JSON ({error})") from error
        except RecursionError as error:
            raise DataError(f"{place} {number}: JSON nested too deeply to be read; drop the line or mend it") from error
        except (KeyError, TypeError, IndexError) as error:
            raise DataError(
                f"{place} {number}: no key '{text_key}' in it; name the text's key by --text-key"
            ) from error
        if not isinstance(text, str):
            raise DataError(f"{place} {number}: '{text_key}' is {type(text).__name__}, not a string")
        if text:
            documents.append((number, text))
    return documents


def _parse_texts(block: bytes, place: str, first: int, mark: re.Pattern[bytes] | None) -> Documents:
    pieces = [piece.strip(b"\r\n") for piece in mark.split(block)] if mark else [block]
    documents: Documents = []
    for number, piece in enumerate(pieces, first):
        try:
            text = piece.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{place} {number}: not UTF-8 at byte {error.start} of the document") from error
        if text:
            documents.append((number, text))
    return documents


@contextlib.contextmanager
def _one_line(fault: str) -> Iterator[None]:
    """Reading errors of the file and of its format become one line that names the file."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{fault}: {' '.join(str(error).split())}") from error
