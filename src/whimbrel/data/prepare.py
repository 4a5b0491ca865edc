"""`prepare`: tokenize documents into shards, in order, resumable after every shard.

Worker threads (or Ray tasks) parse and tokenize batches of documents; one thread collects the results in order, assigns
them to splits and writes shards. After each full shard all splits are written, then the manifest, atomically. If the
process dies at any point, the manifest describes a valid prefix of the output and the batch to resume from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whimbrel import __version__
from whimbrel.base.errors import ConfigError, DataError, MissingExtraError, WhimbrelError
from whimbrel.base.files import remove_stale
from whimbrel.base.progress import NoProgress, Progress
from whimbrel.data.manifest import (
    MANIFEST_FILE,
    SHARD_SIZE,
    SPLITS,
    Manifest,
    ResumePoint,
    ShardSettings,
    TokenizerRecord,
    read_manifest,
    write_manifest,
)
from whimbrel.data.shards import MAX_TOKENS, ShardWriter
from whimbrel.data.sources import (
    FINEWEB,
    DocumentBatch,
    Source,
    check_encoding,
    check_separator,
    resolve_sources,
    with_skip_hint,
)
from whimbrel.tokenization import Tokenizer, load_tokenizer
from whimbrel.tokenization.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

__all__ = [
    "Backend",
    "available_cores",
    "check_output_directory",
    "default_directory",
    "encode_on_ray",
    "encode_on_threads",
    "is_valid_name",
    "prepare",
]

BYTES_PER_TOKEN = 4
"""Estimate for plain text, used only to choose the share of documents to hold out."""
HELD_OUT_FACTOR = 4.0
"""Oversampling factor of validation candidates, so that enough documents are found; unused candidates become training
data.
"""
MIN_HELD_OUT_FACTOR = 2.0
"""Oversampling factor of larger validation splits: few documents are left to make up for an unlucky selection."""
MAX_HELD_OUT_SHARE = 0.9
"""Share of the tokens above which a validation split leaves too few to train on."""
HELD_OUT_PARTS = 8
"""Documents longer than `val_tokens` divided by this are split, so that a few long documents can be divided, too."""
MIN_PART_TOKENS = 64
MAX_SHARDS = 10_000
HELD_OUT_SHARE = 0.01
"""Share of documents considered for validation if the size of the source is unknown."""
RAY_BATCHES_AHEAD = 8
"""Encoded batches of one file that may wait to be written."""

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")


def prepare(
    sources: Sequence[str],
    out_dir: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    name: str,
    shard_size: int = SHARD_SIZE,
    total_tokens: int | None = None,
    val: Sequence[str] = (),
    val_tokens: int = 0,
    text_key: str = "text",
    separator: str | None = None,
    encoding: str = "utf-8",
    skip_bad: bool = False,
    backend: Backend | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write the documents of `sources` as shards to `out_dir`, or finish what an interrupted call with the same
    arguments started there.

    The tokenizer is saved too, so that `load_tokenizer(out_dir)` returns the one that the shards were prepared with.

    `val` lists the sources of the validation split. `val_tokens` instead holds out documents of `sources`, selected by
    hash, and excludes copies of them from training; documents that are long relative to `val_tokens` are split for
    this. `encoding` applies to text and jsonl files. `skip_bad` skips documents that cannot be read. `backend` runs the
    encoding: `encode_on_threads(n)` (default: all cores) or `encode_on_ray`; the shards are the same bytes with either.
    """
    directory = Path(out_dir)
    _check_arguments(name, shard_size, total_tokens, val, val_tokens)
    check_output_directory(directory)
    val_sources, train_sources = resolve_sources(val), resolve_sources(sources)
    check_separator(separator, val_sources + train_sources)
    check_encoding(encoding, val_sources + train_sources)
    _check_number_of_shards(shard_size, _available_tokens(train_sources, total_tokens))
    settings = ShardSettings(
        name=name,
        shard_size=shard_size,
        total_tokens=total_tokens,
        val_tokens=val_tokens,
        val_share=_val_share(train_sources, total_tokens, val_tokens),
        text_key=text_key,
        separator=separator,
        encoding=encoding,
        skip_bad=skip_bad,
    )
    planned = Manifest(
        tool=f"whimbrel {__version__}",
        tokenizer=TokenizerRecord(
            fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size, eot_id=tokenizer.eot_id
        ),
        sources=(
            *(source.record("val") for source in val_sources),
            *(source.record("train") for source in train_sources),
        ),
        settings=settings,
        resume=ResumePoint(source=0, batch=0),
    )
    _check_copies(planned)
    manifest = _resumed_manifest(directory, planned)
    _check_tokenizer(directory, tokenizer)
    if manifest.resume is None:
        logger.info("%s is already prepared", directory)
        return manifest
    train_bytes = [source.text_bytes() for source in train_sources]
    collector = _ShardCollector(directory, manifest, tokenizer, len(val_sources), train_bytes)
    batches = (backend or encode_on_threads(available_cores()))(
        val_sources + train_sources, manifest.resume, BatchEncoder.from_settings(tokenizer, settings), settings
    )
    return collector.run(batches, progress or NoProgress())


def check_output_directory(directory: Path) -> None:
    """Raise if a file is where the directory, or one of its parents, should be."""
    parent = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not parent.is_dir():
        raise ConfigError(f"expected a directory for --out-dir, got {directory}: {parent} is a file")


def default_directory(name: str, sources: Sequence[str], total_tokens: int | None) -> Path:
    """The default `--out-dir`: `data/NAME` and the token budget, as in `data/fineweb20M`; `10B` for all of FineWeb."""
    if total_tokens is None:
        return Path("data") / (f"{name}10B" if list(sources) == [FINEWEB] else name)
    name = f"{name}-" if name[-1].isdigit() else name
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if total_tokens >= size:
            return Path("data") / f"{name}{total_tokens / size:g}{unit}"
    return Path("data") / f"{name}{total_tokens}"


class _ShardCollector:
    """Collects encoded batches: assigns tokens to splits, and writes shards and the manifest as shards fill up."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        tokenizer: Tokenizer,
        num_val_sources: int,
        train_bytes: Sequence[int | None],
    ) -> None:
        self._directory, self._manifest, self._num_val_sources = directory, manifest, num_val_sources
        self._train_bytes = train_bytes
        self._created_directory, self._written = not directory.exists(), set[Path]()
        self._settings, self._tokenizer = manifest.settings, tokenizer
        self._train, self._val = (
            ShardWriter(directory, manifest.settings, split, tokenizer.dtype, manifest.shards_of(split))
            for split in SPLITS
        )
        self._documents, self._skipped, self._first_error = manifest.documents, manifest.skipped, ""
        self._held_out = {document_hash(document) for document in self._val.documents(tokenizer.eot_id)}

    def run(self, batches: Iterator[tuple[ResumePoint, EncodedBatch]], progress: Progress) -> Manifest:
        """Process batches until they end or the token budgets are met. On an error before the first complete shard,
        everything written so far is removed.
        """
        before = self._train.tokens
        progress.start(self._settings.total_tokens, "tokens", before)
        try:
            for point, encoded in () if self._complete() else batches:
                self._add(point, encoded)
                if (expected := self._estimate(point, encoded.progress)) is not None:
                    progress.expect(expected)
                progress.advance(self._train.tokens - before)
                before = self._train.tokens
                if self._train.full or self._val.full:
                    self._save(point)
                if self._complete():
                    break
            self._check_held_out()
            self._check_result()
            self._save(None)
            progress.finish()
        except WhimbrelError:
            if not self._manifest.shards:
                self._discard()
            raise
        finally:
            progress.close()
        return self._manifest

    def _add(self, point: ResumePoint, encoded: EncodedBatch) -> None:
        self._documents += encoded.documents
        self._skipped += encoded.skipped
        self._first_error = self._first_error or encoded.first_error
        if point.source < self._num_val_sources:
            self._val.add(encoded.tokens)
            return
        self._add_training(encoded.tokens)
        for document in encoded.held_out:
            key = document_hash(document)
            if key in self._held_out:
                continue  # do not train on copies of validation documents, and validate on each only once
            if self._val.tokens < self._settings.val_tokens:
                self._val.add(document)
                self._held_out.add(key)
            else:
                self._add_training(document)

    def _add_training(self, tokens: NDArray[Any]) -> None:
        total = self._settings.total_tokens
        self._train.add(tokens if total is None else tokens[: total - self._train.tokens])

    def _complete(self) -> bool:
        return self._train.tokens == self._settings.total_tokens and self._val.tokens >= self._settings.val_tokens

    def _estimate(self, point: ResumePoint, progress: float | None) -> int | None:
        """Estimated number of training tokens, from the share of the training text read so far; None if unknown."""
        sizes = [size for size in self._train_bytes if size is not None]
        source = point.source - self._num_val_sources
        if self._settings.total_tokens is not None or source < 0 or progress is None or None in self._train_bytes:
            return None
        return round(self._train.tokens * sum(sizes) / (sum(sizes[:source]) + progress * sizes[source]))

    def _check_held_out(self) -> None:
        """Remove what was written and raise if `val_tokens` leaves hardly any text to train on."""
        settings, held_out = self._settings, self._val.tokens
        available = self._train.tokens + held_out
        if (
            settings.val_tokens
            and self._train.tokens != settings.total_tokens
            and held_out > MAX_HELD_OUT_SHARE * available
        ):
            self._discard()
            raise DataError(
                f"--val-tokens {settings.val_tokens} holds out {held_out:,} of {available:,} tokens, too many to train "
                "on the rest: pass a smaller number, or use --val"
            )

    def _check_result(self) -> None:
        if self._skipped:
            first = f"; the first: {self._first_error}" if self._first_error else ""
            count = f"{self._skipped:,} document{'s' * (self._skipped != 1)}"
            logger.warning("skipped %s that could not be read%s", count, first)
        if not self._train.tokens:
            raise DataError("the training sources have no text: expected at least one non-empty document")
        if self._num_val_sources and not self._val.tokens:
            raise DataError("the validation sources have no text: expected at least one non-empty document")
        total, val_tokens = self._settings.total_tokens, self._settings.val_tokens
        if total is not None and self._train.tokens < total:
            logger.warning("the source has only %d of the %d training tokens requested", self._train.tokens, total)
        if self._val.tokens < val_tokens:
            logger.warning(
                "held out only %d of the %d validation tokens requested, because the source is too small: add text, or "
                "pass validation files with `whimbrel prepare --val`",
                self._val.tokens,
                val_tokens,
            )

    def _save(self, resume: ResumePoint | None) -> None:
        if not self._manifest.shards:
            self._save_first()
        shards = self._train.write() + self._val.write()
        self._manifest = dataclasses.replace(
            self._manifest, shards=shards, documents=self._documents, skipped=self._skipped, resume=resume
        )
        write_manifest(self._directory, self._manifest)

    def _save_first(self) -> None:
        """Write the manifest and the tokenizer before the first shard. An existing tokenizer is the same one
        (`_check_tokenizer`) and is kept.
        """
        existing = {path for path in self._directory.glob("*") if path.is_file()}
        self._written = {
            self._directory / name for name in (MANIFEST_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
        } - existing
        write_manifest(self._directory, self._manifest)
        if self._directory / TOKENIZER_FILE not in existing:
            self._tokenizer.save(self._directory)

    def _discard(self) -> None:
        """Remove the files that this run wrote, and the directory if it created it."""
        for path in self._written | self._train.written | self._val.written:
            path.unlink(missing_ok=True)
        if self._created_directory and self._directory.is_dir() and not any(self._directory.iterdir()):
            self._directory.rmdir()


# Encoding: a pure function of a batch, so that any thread or machine can process any batch.


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """The tokens of one batch of documents."""

    tokens: NDArray[Any]
    """The documents, concatenated."""
    held_out: tuple[NDArray[Any], ...]
    """Documents whose hash makes them candidates for validation."""
    documents: int
    """Number of documents in the batch."""
    skipped: int
    """Number of documents that could not be read."""
    first_error: str
    """Why the first of them could not be read; empty if there are none."""
    progress: float | None
    """`DocumentBatch.progress`."""


@dataclass(frozen=True, slots=True)
class BatchEncoder:
    """Parses and tokenizes a batch; each document starts with the end-of-text token."""

    tokenizer: Tokenizer
    val_share: float
    max_length: int
    """Characters above which a document is split into parts, of which some may be held out; only with `val_share`."""
    skip_bad: bool

    @classmethod
    def from_settings(cls, tokenizer: Tokenizer, settings: ShardSettings) -> BatchEncoder:
        """The encoder for these settings."""
        part = max(settings.val_tokens // HELD_OUT_PARTS, MIN_PART_TOKENS)
        return cls(tokenizer, settings.val_share, part * BYTES_PER_TOKEN, settings.skip_bad)

    def __call__(self, batch: DocumentBatch) -> EncodedBatch:
        """Raises DataError with the location of the document."""
        train: list[NDArray[Any]] = [np.empty(0, dtype=self.tokenizer.dtype)]
        held_out: list[NDArray[Any]] = []
        errors: list[str] = []
        documents = batch.parse()
        for number, text in documents:
            try:
                if isinstance(text, DataError):
                    raise text
                parts = split_text(text, self.max_length) if self.val_share else [text]
                try:
                    tokens = self.tokenizer.encode_documents(parts)
                except DataError as error:
                    raise DataError(f"{batch.location} {number}: {error}") from error
            except DataError as error:
                if not self.skip_bad:
                    raise with_skip_hint(error) from error
                errors.append(str(error))
                continue
            self._assign(tokens, train, held_out)
        first_error = errors[0] if errors else ""
        read = len(documents) - len(errors)
        return EncodedBatch(np.concatenate(train), tuple(held_out), read, len(errors), first_error, batch.progress)

    def _assign(self, parts: Iterable[NDArray[Any]], train: list[NDArray[Any]], held_out: list[NDArray[Any]]) -> None:
        """Assign the parts of one document to `train` or `held_out`.

        Every part starts with the end-of-text token, which is dropped where training text continues without a gap.
        """
        continues = False
        for tokens in parts:
            if self.val_share and int.from_bytes(document_hash(tokens), "big") < self.val_share * 2**64:
                held_out.append(tokens)
                continues = False
            else:
                train.append(tokens[1:] if continues else tokens)
                continues = True


def split_text(text: str, size: int) -> list[str]:
    """Split a text into parts of at most `size` characters, after a line break or before a space where possible."""
    parts, start = [], 0
    while len(text) - start > size:
        end, half = start + size, start + size // 2
        cut = text.rfind("\n", half, end) + 1 or max(text.rfind(" ", half + 1, end), 0) or end
        parts.append(text[start:cut])
        start = cut
    return [*parts, text[start:]]


def document_hash(tokens: NDArray[Any]) -> bytes:
    """Eight bytes that depend on the tokens only, so that copies of a document are in the same split."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()


Backend = Callable[
    [Sequence[Source], ResumePoint, BatchEncoder, ShardSettings], Iterator[tuple[ResumePoint, EncodedBatch]]
]
"""Encodes all batches starting at a resume point, in order. Yields each with the resume point that follows it."""


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_on_threads(workers: int) -> Backend:
    """A backend with `workers` threads.

    Threads, not processes: both tokenizer libraries release the GIL, so no text is copied between processes, nothing
    has to start up, and nothing is left running if this process is killed.
    """

    def backend(
        sources: Sequence[Source], start: ResumePoint, encoder: BatchEncoder, settings: ShardSettings
    ) -> Iterator[tuple[ResumePoint, EncodedBatch]]:
        def batches() -> Iterator[tuple[ResumePoint, DocumentBatch]]:
            for index in range(start.source, len(sources)):
                skip = start.batch if index == start.source else 0
                source_batches = sources[index].batches(settings.text_key, settings.separator, skip, settings.encoding)
                for number, batch in enumerate(source_batches, skip + 1):
                    yield ResumePoint(source=index, batch=number), batch

        def encode(item: tuple[ResumePoint, DocumentBatch]) -> tuple[ResumePoint, EncodedBatch]:
            return item[0], encoder(item[1])

        return map_in_order(encode, batches(), workers)

    return backend


def map_in_order(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Like `map`, on `workers` threads; reads at most 2 * `workers` items ahead."""
    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="encode")
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def encode_on_ray(
    sources: Sequence[Source], start: ResumePoint, encoder: BatchEncoder, settings: ShardSettings
) -> Iterator[tuple[ResumePoint, EncodedBatch]]:
    """A backend with one Ray task per file, on the current Ray cluster or a new one on this machine.

    Source files must have the same path on every machine. Needs the extra `ray`.
    """
    try:
        ray: Any = importlib.import_module("ray")  # Any: its annotations are partial
    except ImportError as error:
        raise MissingExtraError("--ray", "ray", "ray") from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    task = ray.remote(_encode_source).options(
        num_returns="streaming", _generator_backpressure_num_objects=RAY_BATCHES_AHEAD
    )
    tokenizer = ray.put((encoder.tokenizer.to_json(), encoder.tokenizer.eot_token))

    def submit(index: int) -> tuple[int, int, Any]:
        skip = start.batch if index == start.source else 0
        return index, skip, task.remote(sources[index], tokenizer, settings, skip)

    waiting = iter(range(start.source, len(sources)))
    cores = int(ray.cluster_resources().get("CPU", 1))
    running = deque(submit(index) for index in itertools.islice(waiting, cores))
    while running:
        index, skip, results = running.popleft()
        for number, reference in enumerate(results, skip + 1):
            try:
                encoded = ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, WhimbrelError) else error) from error
            yield ResumePoint(source=index, batch=number), encoded
        running.extend(submit(index) for index in itertools.islice(waiting, 1))


def _encode_source(
    source: Source, tokenizer: tuple[str, str], settings: ShardSettings, skip: int
) -> Iterator[EncodedBatch]:
    """The Ray task: encode one file, starting at its batch `skip`."""
    text, eot_token = tokenizer
    encoder = BatchEncoder.from_settings(Tokenizer.from_json(text, eot_token), settings)
    for batch in source.batches(settings.text_key, settings.separator, skip, settings.encoding):
        yield encoder(batch)


# Validation of arguments and of an existing output directory.


def is_valid_name(name: str) -> bool:
    """Whether shards can have this name, which is part of their file names."""
    is_train_or_val = any(f"_{split}_" in f"{name}_" for split in SPLITS)
    return re.fullmatch(r"[\w.-]+", name) is not None and bool(name.strip(".")) and not is_train_or_val


def _check_arguments(name: str, shard_size: int, total_tokens: int | None, val: Sequence[str], val_tokens: int) -> None:
    if not is_valid_name(name):
        raise ConfigError(
            f"expected --name with only letters, digits, '_', '.', '-', without _train or _val, got '{name}'"
        )
    if not 1 <= shard_size <= MAX_TOKENS:
        raise ConfigError(f"expected --shard-size of 1 to {MAX_TOKENS:,} tokens, got {shard_size}")
    if total_tokens is not None and total_tokens < 1:
        raise ConfigError(f"expected --total-tokens >= 1, got {total_tokens}; omit it to use all tokens")
    if val_tokens < 0:
        raise ConfigError(f"expected --val-tokens >= 0, got {val_tokens}")
    if val and val_tokens:
        raise ConfigError("--val and --val-tokens both define the validation split: pass only one of them")


def _check_copies(manifest: Manifest) -> None:
    """Raise if a file is used for both training and validation; warn about copies of a training file."""
    train: dict[tuple[int, str], str] = {}
    for source in manifest.sources:
        if source.role == "train" and source.size:
            key = (source.size, source.sha256)
            if key in train:
                logger.warning("%s is a copy of %s: its text is used twice", source.name, train[key])
            train.setdefault(key, source.name)
    for source in manifest.sources:
        if source.role == "val" and source.size and (name := train.get((source.size, source.sha256))) is not None:
            raise DataError(
                f"validation source {source.name} and training source {name} have the same content: choose "
                "another --val, or hold documents out with --val-tokens"
            )


def _check_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    file = directory / TOKENIZER_FILE
    if file.exists() and load_tokenizer(directory).fingerprint != tokenizer.fingerprint:
        raise DataError(f"{file} is a different tokenizer: choose another --out-dir, or use --tokenizer {directory}")


def _resumed_manifest(directory: Path, planned: Manifest) -> Manifest:
    """The manifest of an earlier run with the same arguments, or `planned` in a new directory."""
    existing = read_manifest(directory)
    if existing is None:
        if any(directory.glob("[!.]*.bin")):
            raise DataError(f"{directory} has shards without a {MANIFEST_FILE}: choose another --out-dir")
        return planned
    for part, difference in (
        ("tokenizer", "with a different tokenizer"),
        ("sources", "from different sources"),
        ("settings", f"with different settings ({_difference(existing.settings, planned.settings)})"),
    ):
        if getattr(existing, part) != getattr(planned, part):
            raise DataError(f"{directory} has shards prepared {difference}: choose another --out-dir or remove it")
    for shard in existing.shards:
        if not (directory / shard.file).is_file():
            raise DataError(
                f"{directory / shard.file} is missing but listed in {MANIFEST_FILE}: remove the directory and restart"
            )
    remove_stale(directory)
    return existing


def _difference(before: ShardSettings, now: ShardSettings) -> str:
    """The settings that differ, with both values: `separator was '\\n\\n', now none`."""

    def shown(value: object) -> str:
        return "none" if value is None else repr(value)

    values = [(field.name, getattr(before, field.name), getattr(now, field.name)) for field in dataclasses.fields(now)]
    return ", ".join(f"{name} was {shown(old)}, now {shown(new)}" for name, old, new in values if old != new)


def _available_tokens(sources: Sequence[Source], limit: int | None) -> int | None:
    """Estimated number of tokens of the sources, or `limit` if that is lower; None if both are unknown."""
    sizes = [source.text_bytes() for source in sources]
    known = None if None in sizes else sum(size or 0 for size in sizes) // BYTES_PER_TOKEN
    return min((count for count in (known, limit) if count is not None), default=None)


def _check_number_of_shards(shard_size: int, tokens: int | None) -> None:
    if tokens is not None and tokens > MAX_SHARDS * shard_size:
        raise ConfigError(
            f"expected --shard-size of at least {-(-tokens // MAX_SHARDS):,} for about {tokens:,} tokens, got "
            f"{shard_size}: it would write more than {MAX_SHARDS:,} files"
        )


def _val_share(sources: Sequence[Source], total_tokens: int | None, val_tokens: int) -> float:
    """The share of documents considered for validation. Depends on the arguments only: a resume uses the same."""
    if not val_tokens:
        return 0.0
    available = _available_tokens(sources, total_tokens and total_tokens + val_tokens)
    if available is None:
        return HELD_OUT_SHARE
    needed = val_tokens / max(available, 1)
    return min(round(HELD_OUT_FACTOR * needed, 6), max(0.5, round(MIN_HELD_OUT_FACTOR * needed, 6)), 1.0)
