"""`prepare`: documents of any source to token shards, in order, resumable at the last whole shard.

After each full shard every split writes what it holds and the manifest follows, last and atomically: at whatever moment
the process dies, the manifest describes a true beginning of the output and the batch to go on from.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from whimbrel import __version__
from whimbrel.base.errors import ConfigError, DataError, WhimbrelError
from whimbrel.base.files import remove_stale
from whimbrel.base.progress import NoProgress, Progress
from whimbrel.data.encoding import BatchEncoder, Encoded, fingerprint
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
from whimbrel.data.pipeline import Engine, available_cores, encode_on_threads
from whimbrel.data.shards import MOST_TOKENS
from whimbrel.data.sources import FINEWEB, Origin, check_separator, open_source
from whimbrel.data.writing import ShardWriter
from whimbrel.tokenization import Tokenizer, load_tokenizer
from whimbrel.tokenization.tokenizer import SETTINGS_FILE, TOKENIZER_FILE

__all__ = ["default_directory", "prepare"]

BYTES_PER_TOKEN = 4
"""Of plain text, about; only sizes the share of documents to hold out."""
SPARE = 4.0
"""How many times more text than asked is offered to validation, so that enough is found; the rest is trained on."""
UNKNOWN_SHARE = 0.01


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
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write the documents of `sources` as shards into `out_dir`, or finish what an interrupted call began there.

    The tokenizer goes there too, so that `load_tokenizer(out_dir)` gives the one that made the shards.

    `val` names sources of the validation split; `val_tokens` takes whole documents by hash out of `sources` instead,
    and copies of these are not trained on.
    """
    directory = Path(out_dir)
    _check_request(name, shard_size, total_tokens, val, val_tokens)
    _check_place(directory)
    held_out = [origin for source in val for origin in open_source(source)]
    training = [origin for source in sources for origin in open_source(source)]
    check_separator(separator, held_out + training)
    settings = ShardSettings(
        name=name,
        shard_size=shard_size,
        total_tokens=total_tokens,
        val_tokens=val_tokens,
        val_share=_val_share(training, total_tokens, val_tokens),
        text_key=text_key,
        separator=separator,
    )
    plan = Manifest(
        tool=f"whimbrel {__version__}",
        tokenizer=TokenizerRecord(
            fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size, eot_id=tokenizer.eot_id
        ),
        sources=tuple(o.record("val") for o in held_out) + tuple(o.record("train") for o in training),
        settings=settings,
        resume=ResumePoint(source=0, batch=0),
    )
    _check_disjoint(plan)
    manifest = _continued(directory, plan)
    _check_tokenizer(directory, tokenizer)
    if manifest.resume is None:
        logging.getLogger(__name__).info("%s is prepared already", directory)
        return manifest
    job = _Job(directory, manifest, tokenizer, len(held_out), [origin.text_bytes() for origin in training])
    batches = (engine or encode_on_threads(available_cores()))(
        held_out + training, manifest.resume, BatchEncoder(tokenizer, settings.val_share), settings
    )
    return job.run(batches, progress or NoProgress())


def default_directory(name: str, sources: Sequence[str], total_tokens: int | None) -> Path:
    """Where shards go that were given no place: `data/fineweb20M`, or `data/fineweb10B` for all of that sample."""
    if total_tokens is None:
        return Path("data") / (f"{name}10B" if list(sources) == [FINEWEB] else name)
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if total_tokens >= size:
            return Path("data") / f"{name}{total_tokens / size:g}{unit}"
    return Path("data") / f"{name}{total_tokens}"


class _Job:
    """One run over the batches: sorts tokens into splits, writes when a shard is full, and says where it got to."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        tokenizer: Tokenizer,
        val_sources: int,
        training_bytes: Sequence[int | None],
    ) -> None:
        self._directory, self._manifest, self._val_sources = directory, manifest, val_sources
        self._training_bytes = training_bytes
        self._made_directory, self._written = not directory.exists(), set[Path]()
        self._settings, self._tokenizer = manifest.settings, tokenizer
        self._train, self._val = (
            ShardWriter(directory, manifest.settings, split, tokenizer.dtype, manifest.of_split(split))
            for split in SPLITS
        )
        self._documents = manifest.documents
        self._held_out = {fingerprint(document) for document in self._val.documents(tokenizer.eot_id)}

    def run(self, batches: Iterator[tuple[ResumePoint, Encoded]], progress: Progress) -> Manifest:
        """Take batches until they end or every budget is met; leave nothing behind if no shard came of it."""
        before = self._train.tokens
        progress.start(self._settings.total_tokens, "tokens", before)
        try:
            for point, encoded in () if self._enough() else batches:
                self._take(point, encoded)
                if (expected := self._expected(point, encoded.read)) is not None:
                    progress.expect(expected)
                progress.advance(self._train.tokens - before)
                before = self._train.tokens
                if self._train.full or self._val.full:
                    self._save(point)
                if self._enough():
                    break
            self._check_outcome()
            self._save(None)
            progress.finish()
        except WhimbrelError:
            if not self._manifest.shards:
                self._discard()
            raise
        finally:
            progress.close()
        return self._manifest

    def _take(self, point: ResumePoint, encoded: Encoded) -> None:
        self._documents += encoded.documents
        if point.source < self._val_sources:
            self._val.add(encoded.tokens)
            return
        self._train_on(encoded.tokens)
        for document in encoded.held_out:
            key = fingerprint(document)
            if key in self._held_out:
                continue  # do not train on copies of validation documents, and validate on each only once
            if self._val.tokens < self._settings.val_tokens:
                self._val.add(document)
                self._held_out.add(key)
            else:
                self._train_on(document)

    def _train_on(self, tokens: NDArray[Any]) -> None:
        total = self._settings.total_tokens
        self._train.add(tokens if total is None else tokens[: total - self._train.tokens])

    def _enough(self) -> bool:
        return self._train.tokens == self._settings.total_tokens and self._val.tokens >= self._settings.val_tokens

    def _expected(self, point: ResumePoint, read: float | None) -> int | None:
        """About how many training tokens there will be, from the share of the training text that is read."""
        sizes = [size for size in self._training_bytes if size is not None]
        source = point.source - self._val_sources
        if self._settings.total_tokens is not None or source < 0 or read is None or None in self._training_bytes:
            return None
        return round(self._train.tokens * sum(sizes) / (sum(sizes[:source]) + read * sizes[source]))

    def _check_outcome(self) -> None:
        total, val_tokens = self._settings.total_tokens, self._settings.val_tokens
        if not self._train.tokens:
            raise DataError("the training source holds no text: every file was read and no document found")
        if self._val_sources and not self._val.tokens:
            raise DataError("the validation source holds no text: every file was read and no document found")
        for wanted, got, split in (
            (total, self._train.tokens, "training"),
            (val_tokens, self._val.tokens, "validation"),
        ):
            if wanted is not None and got < wanted:
                logging.getLogger(__name__).warning(
                    "the source ended at %d of the %d %s tokens asked for", got, wanted, split
                )

    def _save(self, resume: ResumePoint | None) -> None:
        if not self._manifest.shards:
            self._begin()
        shards = self._train.write() + self._val.write()
        self._manifest = dataclasses.replace(self._manifest, shards=shards, documents=self._documents, resume=resume)
        write_manifest(self._directory, self._manifest)

    def _begin(self) -> None:
        """What comes before the first shard; a tokenizer that is there is this one (`_check_tokenizer`) and stays."""
        held = {path for path in self._directory.glob("*") if path.is_file()}
        self._written = {self._directory / name for name in (MANIFEST_FILE, TOKENIZER_FILE, SETTINGS_FILE)} - held
        write_manifest(self._directory, self._manifest)
        if self._directory / TOKENIZER_FILE not in held:
            self._tokenizer.save(self._directory)

    def _discard(self) -> None:
        """Remove what this run wrote, and nothing else."""
        for path in self._written | self._train.written | self._val.written:
            path.unlink(missing_ok=True)
        if self._made_directory and self._directory.is_dir() and not any(self._directory.iterdir()):
            self._directory.rmdir()


def _check_place(directory: Path) -> None:
    """Refuse a folder that cannot be made, before any work is done for it."""
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"out_dir={directory} cannot be a folder: {nearest} is a file; name another --out_dir")


def _check_disjoint(plan: Manifest) -> None:
    """Raise if a file is used for both training and validation."""
    train = {(source.size, source.sha256): source.name for source in plan.sources if source.role == "train"}
    for source in plan.sources:
        if source.role == "val" and source.size and (name := train.get((source.size, source.sha256))) is not None:
            raise DataError(
                f"validation source {source.name} and training source {name} have the same content: choose "
                "another --val, or hold documents out with --val-tokens"
            )


def _check_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    file = directory / TOKENIZER_FILE
    if file.exists() and load_tokenizer(directory).fingerprint != tokenizer.fingerprint:
        raise DataError(f"{file} is another tokenizer: name another --out_dir, or give --tokenizer {directory}")


def _continued(directory: Path, plan: Manifest) -> Manifest:
    """The manifest to go on from: `plan` for a new folder, else what the folder holds, if made in the same way."""
    held = read_manifest(directory)
    if held is None:
        if any(directory.glob("[!.]*.bin")):
            raise DataError(f"{directory} holds shards without a {MANIFEST_FILE}: name another --out_dir")
        return plan
    for part in ("tokenizer", "sources", "settings"):
        if getattr(held, part) != getattr(plan, part):
            fault = _difference(part, getattr(held, part), getattr(plan, part))
            raise DataError(f"{directory} holds shards made with other {fault}: name another --out_dir or remove it")
    for shard in held.shards:
        if not (directory / shard.file).is_file():
            raise DataError(
                f"{directory / shard.file} is missing but listed in {MANIFEST_FILE}: remove the folder first"
            )
    remove_stale(directory)
    return held


def _difference(part: str, held: Any, given: Any) -> str:
    if part != "settings":
        return part
    names = [field.name for field in dataclasses.fields(held)]
    changed = [name for name in names if getattr(held, name) != getattr(given, name)]
    return f"settings ({', '.join(f'{name}={getattr(held, name)}' for name in changed)})"


def _val_share(training: Sequence[Origin], total_tokens: int | None, val_tokens: int) -> float:
    """The share of documents that the hash offers; a fixed function of the request, so that a resume repeats it."""
    if not val_tokens:
        return 0.0
    sizes = [origin.text_bytes() for origin in training]
    known = None if None in sizes else sum(size or 0 for size in sizes) // BYTES_PER_TOKEN
    available = min((n for n in (known, total_tokens and total_tokens + val_tokens) if n is not None), default=None)
    return UNKNOWN_SHARE if available is None else min(0.5, round(SPARE * val_tokens / max(available, 1), 6))


def _check_request(name: str, shard_size: int, total_tokens: int | None, val: Sequence[str], val_tokens: int) -> None:
    if not re.fullmatch(r"[\w.-]+", name) or any(f"_{split}_" in f"{name}_" for split in SPLITS):
        raise ConfigError(
            f"name='{name}' cannot name shards: use letters, digits, '-', and no _train or _val at its end"
        )
    if not 1 <= shard_size <= MOST_TOKENS:
        raise ConfigError(f"shard_size={shard_size} must be 1 to {MOST_TOKENS:,} tokens")
    if total_tokens is not None and total_tokens < 1:
        raise ConfigError(f"total_tokens={total_tokens} must be at least 1; leave it out to take everything")
    if val_tokens < 0:
        raise ConfigError(f"val_tokens={val_tokens} must be 0 or more")
    if val and val_tokens:
        raise ConfigError(
            f"val_tokens={val_tokens} takes validation text from the source, and --val names one: give one"
        )
