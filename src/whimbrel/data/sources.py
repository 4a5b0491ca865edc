"""Sources of documents: parquet, jsonl and text files (plain, gz, zst), and datasets on the Hugging Face Hub.

A source yields its documents in order, in batches of bounded size. One thread reads the raw bytes; parsing is deferred
to `DocumentBatch.parse`, so that worker threads can do it. `Source.rows` reads complete rows instead of one text each.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import glob
import hashlib
import itertools
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from whimbrel.base.errors import ConfigError, DataError, MissingExtraError
from whimbrel.base.files import broken_link
from whimbrel.config import suggest
from whimbrel.data.manifest import SourceRecord

__all__ = [
    "FINEWEB",
    "DocumentBatch",
    "HubDataset",
    "LocalFile",
    "Row",
    "Source",
    "check_encoding",
    "check_separator",
    "is_source",
    "iter_documents",
    "resolve_source",
    "resolve_sources",
    "source_name",
    "with_skip_hint",
]

FINEWEB = "HuggingFaceFW/fineweb:sample-10BT"
"""The default source of `whimbrel prepare`."""
BUNDLED = {"shakespeare": Path(__file__).with_name("shakespeare.txt.gz")}
"""Texts that come with the package: 1.1 MB from Shakespeare's plays, public domain, from pytorch/examples (minGPT)."""

FILE_TYPES = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".md": "text"}
CODECS = {".gz": "gzip", ".zst": "zstd"}
COMPRESSION_RATIO = 3
"""Estimated bytes of text per byte of a compressed file; only used to size the validation split."""
ARRAY_REMEDY = "write one object per line (jq -c '.[]' data.json > data.jsonl)"
TABLE_REMEDIES = {".json": ARRAY_REMEDY} | dict.fromkeys((".csv", ".tsv"), "convert it to jsonl or parquet")
"""What to do with files that could be read as text, but probably should not be."""
SUFFIX = re.compile(r"\.[a-z]\w*(\.(gz|zst))?$", re.IGNORECASE)
"""The suffix of a file name; the end of `Apache-2.0` is none."""
MAX_SUFFIXES = 5
"""Suffixes of ignored files that are listed."""
FILE_SIMILARITY = 0.7
"""Minimum similarity of a file name to be suggested in place of another."""
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?")
FINGERPRINT_BYTES = 1 << 16
"""Bytes hashed at each end of a file to identify it."""

INVALID_BYTES = "whimbrel-invalid-bytes"
codecs.register_error(INVALID_BYTES, lambda error: ("\udcff", error.end))  # type: ignore[attr-defined]

BATCH_BYTES = 1 << 20
"""Approximate size of a batch of text; a longer document forms a batch alone."""
BATCH_DOCUMENTS = 64
"""Documents in a batch of parquet or Hub rows."""
MAX_DOCUMENT_BYTES = 1 << 28
"""256 MiB: a document is encoded in memory by one thread."""
MAX_SEPARATOR_BYTES = 1 << 12
"""Maximum separator length in bytes, counting each newline twice."""
LINE_END = re.compile(rb"\n")
logger = logging.getLogger(__name__)

Documents = list[tuple[int, str | DataError]]
"""Texts with their numbers in the file, or why one cannot be read. Empty documents are omitted."""


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """Consecutive documents of one source."""

    location: str
    """Start of error messages, completed by a document number: `a.jsonl, line`."""
    parse: Callable[[], Documents]
    """Parses the documents; the errors of those that cannot be read include the location."""
    progress: float | None
    """Share of the source read up to the end of this batch, for estimates; None if the size is unknown."""


class Row(NamedTuple):
    """A line of a jsonl file, or a row of a parquet file or Hub dataset."""

    location: str
    """Start of error messages: `a.jsonl, line 3`."""
    value: dict[str, Any] | DataError
    """The error if the row cannot be parsed; without the location."""


class Source(Protocol):
    """An ordered collection of documents: one file or one Hub dataset."""

    @property
    def name(self) -> str:
        """Name for messages and the manifest."""

    def record(self, role: str) -> SourceRecord:
        """The entry in the manifest, which identifies the content without reading all of it."""

    def text_bytes(self) -> int | None:
        """Estimated bytes of text; None if unknown before reading."""

    def batches(
        self, text_key: str, separator: str | None, skip: int, encoding: str = "utf-8"
    ) -> Iterator[DocumentBatch]:
        """The documents in order, without the first `skip` batches."""

    def rows(self) -> Iterator[Row]:
        """The rows in order; a text file is one row with the key `text`."""


def resolve_source(source: str) -> Sequence[Source]:
    """The files and datasets, in order, of a path, directory, glob, bundled text or `owner/dataset[:config]`.

    Directories are searched recursively, except for names that start with a dot, and run directories, whose logs and
    model cards are not text to train on. Their files of other types are ignored, with a warning; a file that is named,
    or matched by a glob, is read as text if its suffix is unknown.
    """
    if not source:
        raise ConfigError(f"{_expected_source()}, got an empty string")
    path = Path(source)
    if path.is_dir():
        files = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
        runs = {file.parent for file in files if file.name == "log.jsonl" and file.with_name("config.toml") in files}
        visible = [
            file
            for file in files
            if not any(part.startswith(".") for part in file.parts) and runs.isdisjoint(file.parents)
        ]
        sources = [file for name in visible if (file := _local_file(path / name, name.as_posix())) is not None]
        ignored = [file for file in visible if _file_type(file)[0] is None]
        if not sources:
            found = f"{_count_suffixes(ignored)}; name files to read them as text" if ignored else "no files"
            raise DataError(f"expected {_supported_suffixes()} files in directory {source}, got {found}")
        if ignored:
            _warn_ignored(source, len(ignored), len(visible), _count_suffixes(ignored))
        return sources
    matches = [path] if path.is_file() else []
    if not matches and glob.has_magic(source):  # `**` alone is any depth, next to other characters it is `*`
        names = glob.iglob(source, recursive=True)  # noqa: PTH207 (pathlib rejects `**.txt`)
        matches = sorted(file for file in map(Path, names) if file.is_file())
    if matches:
        return [_named_file(file) for file in matches]
    if source in BUNDLED:
        return [_named_file(BUNDLED[source])]
    if HUB_NAME.fullmatch(source) and _file_type(path)[0] is None and (":" in source or not path.parent.is_dir()):
        dataset, _, config = source.partition(":")
        return [HubDataset(dataset, config or None)]
    if path.exists():
        raise DataError(
            f"expected a regular file or directory, got the pipe or device {source}: save its text to a file"
        )
    raise DataError(f"no such file: {source}{broken_link(path) or _similar_file(source)}; {_expected_source()}")


def resolve_sources(sources: Sequence[str]) -> list[Source]:
    """The files and datasets of several sources; one that is listed twice is read once."""
    resolved: dict[object, Source] = {}
    for source in itertools.chain.from_iterable(map(resolve_source, sources)):
        key = source.path.resolve() if isinstance(source, LocalFile) else source
        if key in resolved:
            logger.warning("%s is listed more than once: reading it once", source.name)
        resolved.setdefault(key, source)
    return list(resolved.values())


def is_source(path: Path) -> bool:
    """Whether `resolve_source` accepts a local path, judging by its suffix or by the files in the directory.

    A directory with .bin files (token shards) is not a source.
    """
    if not path.is_dir():
        return _file_type(path)[0] is not None
    files = [file for file in path.iterdir() if not file.name.startswith(".")]
    return any(_file_type(file)[0] for file in files) and not any(file.suffix == ".bin" for file in files)


def with_skip_hint(error: DataError) -> DataError:
    """Append the options that help to the error of a document that cannot be read."""
    encoding = "set --encoding, or " if "not UTF-8" in str(error) else ""
    return DataError(f"{error}; {encoding}pass --skip-bad to skip such documents")


def _raise(error: DataError) -> None:
    raise error


def iter_documents(
    sources: Sequence[str],
    text_key: str = "text",
    separator: str | None = None,
    encoding: str = "utf-8",
    on_error: Callable[[DataError], None] = _raise,
    max_bytes: int | None = None,
) -> Iterator[str]:
    """The texts of all documents of `sources`, in order; `on_error` is called for each that cannot be read.

    `max_bytes` limits the amount of text: each source contributes its beginning, in proportion to its size. Raises
    DataError if there is no text.
    """
    resolved = resolve_sources(sources)
    check_separator(separator, resolved)
    check_encoding(encoding, resolved)
    budget, is_empty = 0.0, True
    for source, share in zip(resolved, _shares(resolved, max_bytes), strict=True):
        budget += share  # what one source leaves of its share, later ones may use
        batches = source.batches(text_key, separator, 0, encoding)
        for batch, number, text in ((each, row, text) for each in batches for row, text in each.parse()):
            if budget < 1:
                break
            try:
                data = text.encode() if isinstance(text, str) else text
            except UnicodeEncodeError as error:
                where = f"{batch.location} {number}"
                data = DataError(f"{where}: expected valid Unicode, got a lone surrogate at character {error.start}")
            if isinstance(data, DataError):
                on_error(data)
                continue
            is_empty = False
            yield data[: None if len(data) <= budget else int(budget)].decode(errors="ignore")
            budget -= min(len(data), budget)
    if is_empty:
        verb = "contains" if len(sources) == 1 else "contain"
        raise DataError(f"{', '.join(map(str, sources))} {verb} no text: expected at least one non-empty document")


def _shares(sources: Sequence[Source], max_bytes: int | None) -> list[float]:
    """How many bytes to read of each source; equal shares if the size of one is unknown."""
    if max_bytes is None:
        return [math.inf] * len(sources)
    sizes = [source.text_bytes() for source in sources]
    weights = [1] * len(sizes) if None in sizes else [size or 0 for size in sizes]
    return [max_bytes * weight / max(sum(weights), 1) for weight in weights]


def check_separator(separator: str | None, sources: Sequence[Source]) -> None:
    """Raise for a separator without effect, and for a text file that is too long to be one document."""
    text_files = [source for source in sources if isinstance(source, LocalFile) and source.kind == "text"]
    if separator is None:
        for file in text_files:
            if not file.codec:
                _check_length(file.path, file.text_bytes())
    elif not separator:
        raise ConfigError("--separator is empty: pass the text between documents, or omit it")
    elif len(separator.encode()) + separator.count("\n") > MAX_SEPARATOR_BYTES:
        raise ConfigError(f"expected a separator of at most {MAX_SEPARATOR_BYTES} bytes, got {len(separator.encode())}")
    elif not text_files:
        raise ConfigError(f"--separator {separator!r} applies to text files, but no source is one: omit it")


def check_encoding(encoding: str, sources: Sequence[Source]) -> None:
    """Raise for an unknown encoding, and for one without effect."""
    try:
        codecs.getincrementaldecoder(encoding)(INVALID_BYTES).decode("a".encode(encoding), final=True)
    except (LookupError, ValueError) as error:
        raise ConfigError(f"unknown --encoding {encoding!r}: expected a text encoding such as latin-1") from error
    is_text = any(isinstance(source, LocalFile) and source.kind != "parquet" for source in sources)
    if codecs.lookup(encoding).name != "utf-8" and not is_text:
        raise ConfigError(f"--encoding {encoding} applies to text and jsonl files, but no source is one: omit it")


def source_name(source: str) -> str:
    """A short name for shards prepared from `source`, from its directory, file or dataset name."""
    path = Path(source)
    if glob.has_magic(source) and not path.exists():
        path = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
    name = path.resolve().name if path.is_dir() else path.name.split(":")[0]
    name = name if path.is_dir() else _without_suffixes(name)
    return re.sub(r"[\W_]+", "-", name).strip("-") or "text"


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A parquet, jsonl or text file."""

    path: Path
    name: str
    kind: str
    codec: str | None

    def record(self, role: str) -> SourceRecord:
        """The size and a hash of both ends of the file."""
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                digest = hashlib.sha256(file.read(FINGERPRINT_BYTES))
                file.seek(max(0, size - FINGERPRINT_BYTES))
                digest.update(file.read(FINGERPRINT_BYTES))
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from error
        return SourceRecord(role=role, name=self.name, size=size, sha256=digest.hexdigest())

    def text_bytes(self) -> int:
        """The file size; if compressed, the size that gzip stores, or an estimate with a typical ratio."""
        size = self.path.stat().st_size
        if self.codec == "gzip" and (uncompressed := _gzip_size(self.path)) > size:
            return uncompressed
        return size * (COMPRESSION_RATIO if self.codec or self.kind == "parquet" else 1)

    def batches(
        self, text_key: str, separator: str | None, skip: int, encoding: str = "utf-8"
    ) -> Iterator[DocumentBatch]:
        """The documents in order; skipped batches are read but not parsed."""
        if self.kind == "parquet":
            batches = _parquet_batches(self.path, text_key)
        elif self.kind == "jsonl":
            batches = _jsonl_batches(self.path, self.codec, text_key, encoding)
        else:
            batches = _text_batches(self.path, self.codec, separator, encoding)
        return itertools.islice(batches, skip, None)

    def rows(self) -> Iterator[Row]:
        """The rows in order; a text file is one row with the key `text`."""
        if self.kind == "parquet":
            return _parquet_rows(self.path)
        if self.kind == "jsonl":
            return _jsonl_rows(self.path, self.codec)
        texts = (text for batch in _text_batches(self.path, self.codec, None, "utf-8") for _, text in batch.parse())
        return (Row(str(self.path), text if isinstance(text, DataError) else {"text": text}) for text in texts)


@dataclass(frozen=True, slots=True)
class HubDataset:
    """The training split of a Hub dataset, streamed without storing it. Needs the extra `hub`."""

    dataset: str
    config: str | None

    @property
    def name(self) -> str:
        """`owner/dataset` or `owner/dataset:config`."""
        return f"{self.dataset}:{self.config}" if self.config else self.dataset

    def record(self, role: str) -> SourceRecord:
        """The name only: the Hub has no size or hash that could be checked before reading."""
        return SourceRecord(role=role, name=self.name, size=0, sha256="")

    def text_bytes(self) -> None:
        """None: unknown before reading."""

    def batches(
        self, text_key: str, _separator: str | None, skip: int, _encoding: str = "utf-8"
    ) -> Iterator[DocumentBatch]:
        """The rows in order; `_separator` and `_encoding` apply to files only."""
        location, row = f"{self.name}, row", skip * BATCH_DOCUMENTS
        rows = self._rows(row)
        while batch := list(itertools.islice(rows, BATCH_DOCUMENTS)):
            yield DocumentBatch(location, functools.partial(_parse_rows, batch, location, row, text_key), progress=None)
            row += len(batch)

    def rows(self) -> Iterator[Row]:
        """The rows in order."""
        for number, row in enumerate(self._rows(skip=0)):
            yield Row(f"{self.name}, row {number}", _without_nulls(row))

    def _rows(self, skip: int) -> Iterator[dict[str, Any]]:
        try:
            import datasets
        except ImportError as error:
            raise MissingExtraError(
                f"no such file: {self.name}; reading it as a Hub dataset", "datasets", "hub"
            ) from error
        # Hide the warnings about retries; the last failure is raised below.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        local_files = "pass local files, such as 'fineweb/*.parquet'"
        try:
            rows = iter(datasets.load_dataset(self.dataset, self.config, split="train", streaming=True).skip(skip))
        except FileNotFoundError as error:  # includes DatasetNotFoundError
            raise DataError(
                f"{self.name} was not found locally or on the Hugging Face Hub ({_one_line(error)}): check the name, "
                f"or {local_files}"
            ) from error
        except Exception as error:  # each transport of the Hub client has its own exceptions
            raise DataError(
                f"no such file, and cannot open {self.name} on the Hugging Face Hub ({_one_line(error)}): check the "
                f"name and the network, or {local_files}"
            ) from error
        for row in itertools.count(skip):
            try:
                values = next(rows)
            except StopIteration:
                return
            except Exception as error:
                raise DataError(
                    f"{self.name}, row {row}: cannot read it from the Hugging Face Hub ({_one_line(error)}): check the "
                    f"network and run the command again, or {local_files}"
                ) from error
            yield values


def _gzip_size(path: Path) -> int:
    """The uncompressed size at the end of a gzip file, modulo 4 GiB; of concatenated files, the size of the last."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - 4))
        return int.from_bytes(file.read(4), "little")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Reading files: batches of raw bytes, with a function that parses them.


def _parquet_batches(path: Path, text_key: str) -> Iterator[DocumentBatch]:
    """Rows of a parquet file; only the text column is read."""
    import pyarrow.parquet as pq

    location, row = f"{path}, row", 0
    with _data_errors(f"{path} is not a readable parquet file"), pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if text_key not in names:
            raise DataError(f"{path} has no column '{text_key}': set --text-key to one of {', '.join(names)}")
        for batch in file.iter_batches(BATCH_DOCUMENTS, columns=[text_key], use_threads=False):
            parse = functools.partial(_parse_column, batch.column(0), location, row)
            row += batch.num_rows
            yield DocumentBatch(location, parse, row / file.metadata.num_rows)


def _jsonl_batches(path: Path, codec: str | None, text_key: str, encoding: str) -> Iterator[DocumentBatch]:
    """Lines of a jsonl file, one JSON object each."""
    location, line = f"{path}, line", 1
    for block, progress in _read_blocks(path, codec, LINE_END, encoding):
        yield DocumentBatch(location, functools.partial(_parse_lines, block, location, line, text_key), progress)
        line += block.count(b"\n")


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow.parquet as pq

    row = 0
    with _data_errors(f"{path} is not a readable parquet file"), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH_DOCUMENTS, use_threads=False):
            for value in batch.to_pylist():
                yield Row(f"{path}, row {row}", _without_nulls(value))
                row += 1


def _without_nulls(value: Any) -> Any:
    """Nested values without null fields: columnar formats store a field that any row has for all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _jsonl_rows(path: Path, codec: str | None) -> Iterator[Row]:
    first = 1
    for block, _ in _read_blocks(path, codec, LINE_END):
        for number, line in enumerate(block.split(b"\n"), first):
            if not line.strip():
                continue
            try:
                if number == 1 and line.lstrip().startswith(b"["):
                    raise DataError(f"expected a JSON object per line, got an array: {ARRAY_REMEDY}")
                value = _parse_json_line(line)
                if not isinstance(value, dict):
                    raise DataError(f"expected a JSON object, got a {type(value).__name__}")
            except DataError as error:
                value = error
            yield Row(f"{path}, line {number}", value)
        first += block.count(b"\n")


def _text_batches(path: Path, codec: str | None, separator: str | None, encoding: str) -> Iterator[DocumentBatch]:
    """A text file as one document, or split at `separator`. A newline in the separator matches LF and CRLF."""
    location, number = f"{path}, document", 1
    pattern = None
    if separator:
        lines = separator.replace("\r\n", "\n").split("\n")
        pattern = re.compile(rb"\r?\n".join(re.escape(line.encode()) for line in lines))
    for block, progress in _read_blocks(path, codec, pattern, encoding):
        yield DocumentBatch(location, functools.partial(_parse_texts, block, location, number, pattern), progress)
        number += sum(1 for _ in pattern.finditer(block)) if pattern else 1
    if pattern and number == 1:
        logger.warning("%s does not contain the separator %r: it is one document", path, separator)


def _read_blocks(
    path: Path, codec: str | None, pattern: re.Pattern[bytes] | None, encoding: str = "utf-8"
) -> Iterator[tuple[bytes, float]]:
    """The content of a file in blocks that end after a match of `pattern` (None: one block), with the share read.

    Other encodings are converted to UTF-8, and invalid bytes to one that UTF-8 does not have, so that parsing reports
    them.
    """
    import pyarrow as pa

    pending = bytearray()
    is_utf8 = codecs.lookup(encoding).name == "utf-8"
    decoder = codecs.getincrementaldecoder(encoding)(INVALID_BYTES)
    with _data_errors(f"{path} is not a readable {codec or 'text'} file"), pa.OSFile(str(path)) as raw:
        file, size = pa.CompressedInputStream(raw, codec) if codec else raw, raw.size()
        while block := file.read(BATCH_BYTES):
            searched = max(0, len(pending) - MAX_SEPARATOR_BYTES)  # a separator may span two reads
            pending += block if is_utf8 else decoder.decode(block).encode("utf-8", "surrogateescape")
            end = max((match.end() for match in pattern.finditer(pending, searched)), default=0) if pattern else 0
            if end:
                yield bytes(pending[:end]), raw.tell() / size
                del pending[:end]
            _check_length(path, len(pending))
        pending += b"" if is_utf8 else decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")
    if pending:
        yield bytes(pending), 1.0


def _check_length(path: Path, size: int) -> None:
    if size > MAX_DOCUMENT_BYTES:
        limit = f"{MAX_DOCUMENT_BYTES >> 20} MiB"
        raise DataError(f"{path} has a document of more than {limit}: split it (a text file with --separator)")


def _parse_column(column: Any, location: str, first: int) -> Documents:
    parsed: Documents = []
    for row, value in enumerate(column, first):
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            parsed.append((row, DataError(f"{location} {row}: not UTF-8 at byte {error.start} of the text")))
            continue
        if not isinstance(text, str):
            text = DataError(f"{location} {row}: expected a string, got {_type_name(text)}")
        if text:
            parsed.append((row, text))
    return parsed


def _parse_lines(block: bytes, location: str, first: int, text_key: str) -> Documents:
    parsed: Documents = []
    for number, line in enumerate(block.split(b"\n"), first):
        if not line.strip():
            continue
        try:
            text = _parse_json_line(line)[text_key]
            if not isinstance(text, str):
                raise DataError(f"expected a string in '{text_key}', got {_type_name(text)}")
        except DataError as error:
            text = DataError(f"{location} {number}: {error}")
        except (KeyError, TypeError, IndexError):
            text = DataError(f"{location} {number}: no key '{text_key}'; set --text-key to the key of the text")
        if text:
            parsed.append((number, text))
    return parsed


def _parse_json_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 at byte {error.start} of the line") from error
    except ValueError as error:
        raise DataError(f"not JSON ({error})") from error
    except RecursionError as error:
        raise DataError("JSON nested too deeply; fix or remove the line") from error


def _parse_texts(block: bytes, location: str, first: int, pattern: re.Pattern[bytes] | None) -> Documents:
    pieces = [piece.strip(b"\r\n") for piece in pattern.split(block)] if pattern else [block]
    parsed: Documents = []
    for number, piece in enumerate(pieces, first):
        text: str | DataError
        try:
            text = piece.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            text = DataError(f"{location} {number}: not UTF-8 at byte {error.start} of the document")
        if text:
            parsed.append((number, text))
    return parsed


def _parse_rows(rows: list[dict[str, Any]], location: str, first: int, text_key: str) -> Documents:
    parsed: Documents = []
    for number, row in enumerate(rows, first):
        text = row.get(text_key)
        if not isinstance(text, str):
            names = ", ".join(row)
            text = DataError(f"{location} {number}: no text in '{text_key}'; set --text-key to one of {names}")
        if text:
            parsed.append((number, text))
    return parsed


def _type_name(value: object) -> str:
    return "null" if value is None else type(value).__name__


@contextlib.contextmanager
def _data_errors(message: str) -> Iterator[None]:
    """Convert file-system and parser errors to a one-line DataError that starts with `message`."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{message}: {_one_line(error)}") from error


# Finding files


def _named_file(path: Path) -> LocalFile:
    """The file as a source; as text if its suffix is unknown."""
    file = _local_file(path, path.name)
    if file is None:
        _check_text(path)
        return LocalFile(path, path.name, "text", None)
    return file


def _check_text(path: Path) -> None:
    """Raise unless a file with an unknown suffix starts with UTF-8 text."""
    suffix, expected = path.suffix.lower(), f"expected UTF-8 text or a {_supported_suffixes()} file, got {path}"
    if suffix in TABLE_REMEDIES:
        raise ConfigError(f"{expected}: {TABLE_REMEDIES[suffix]}, or rename it to {path.name}.txt to read it as text")
    try:
        with open(path, "rb") as file:
            block = file.read(FINGERPRINT_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    found = f"NUL at byte {block.index(0)}" if 0 in block else None
    try:
        codecs.getincrementaldecoder("utf-8")().decode(block)  # the block may end inside a character
    except UnicodeDecodeError as error:
        found = found or f"not UTF-8 at byte {error.start}"
    if found is None:
        return
    remedy = f"leave it out, or rename it to {path.name}.txt and set --encoding if it is text in another encoding"
    if suffix in CODECS:
        remedy = f"leave it out, or rename it to {path.stem}.txt{suffix} if it is compressed text"
    raise ConfigError(f"{expected} ({found}): {remedy}")


def _local_file(path: Path, name: str) -> LocalFile | None:
    """The file as a source; None if its suffix is unknown."""
    kind, codec = _file_type(path)
    return None if kind is None else LocalFile(path, name, kind, codec)


def _file_type(path: Path) -> tuple[str | None, str | None]:
    """The kind and codec from the suffixes: `a.jsonl.gz` is (jsonl, gzip); (None, None) if not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    codec = CODECS.get(suffixes[-1]) if suffixes else None
    if codec is not None:
        suffixes.pop()
    kind = FILE_TYPES.get(suffixes[-1]) if suffixes else None
    if kind is None or (codec is not None and kind == "parquet"):
        return None, None
    return kind, codec


def _without_suffixes(name: str) -> str:
    """The name of a file without its supported suffixes."""
    suffixes = "|".join(re.escape(suffix) for suffix in (*FILE_TYPES, *CODECS))
    return re.sub(rf"({suffixes})+$", "", name, flags=re.IGNORECASE)


@functools.cache
def _warn_ignored(source: str, ignored: int, total: int, suffixes: str) -> None:
    """Warn once per directory about files that are not read."""
    logger.warning(
        "ignoring %d of %d files in %s (%s): only %s files are read; pass a file by its path to read it as text",
        ignored, total, source, suffixes, ", ".join(FILE_TYPES),
    )  # fmt: skip


def _count_suffixes(files: Sequence[Path]) -> str:
    """How many files have which suffix, the most frequent ones first: `25 .py, 16 without extension`."""
    counts = Counter(match[0].lower() if (match := SUFFIX.search(file.name)) else "" for file in files)
    shown = [f"{count} {suffix or 'without extension'}" for suffix, count in counts.most_common(MAX_SUFFIXES)]
    others = len(files) - sum(count for _, count in counts.most_common(MAX_SUFFIXES))
    return ", ".join([*shown, *[f"{others} others"] * (others > 0)])


def _similar_file(source: str) -> str:
    """Suggest the source in the same directory with the most similar name, disregarding suffixes; none for a glob."""
    path = Path(source)
    if glob.has_magic(source):
        return ""
    with contextlib.suppress(OSError, ValueError):
        visible = [entry for entry in path.parent.iterdir() if not entry.name.startswith(".")]
        entries = [entry for entry in visible if entry.is_dir() or _file_type(entry)[0] is not None]
        entries.sort(key=lambda entry: entry.suffix == path.suffix)  # the same suffix is preferred
        by_stem = {name: Path(name) for name in BUNDLED if path.parent == Path()}
        by_stem |= {_without_suffixes(entry.name): entry for entry in entries}
        close = suggest(_without_suffixes(path.name), by_stem, FILE_SIMILARITY)
        return "" if close is None else f" (did you mean {by_stem[close]}?)"
    return ""


def _supported_suffixes() -> str:
    return f"{', '.join(FILE_TYPES)} (all but .parquet may be compressed: {' or '.join(CODECS)})"


def _expected_source() -> str:
    return f"expected a file, directory or glob of {_supported_suffixes()}, or owner/dataset[:config] on the Hub"
