"""Perplexity and bits per byte of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.base.progress import NoProgress, Progress
from whimbrel.data import read_manifest
from whimbrel.data.shards import open_stream
from whimbrel.evaluate.scoring import Pair, Scorer
from whimbrel.models.held_out_loss import HeldOutLoss

__all__ = ["TextResult", "perplexity", "shard_perplexity"]

CHUNK_TOKENS = 2**18
"""Documents are collected up to this many tokens before they are scored, so that batches have similar lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextResult:
    """Log-likelihood of a text, and the metrics derived from it."""

    documents: int
    tokens: int
    bytes: int
    """Size of the text in UTF-8."""
    loglikelihood: float
    """Of all documents, in nats."""

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers."""
        return self._loss.bits_per_byte(self.bytes)

    @property
    def bits_per_token(self) -> float:
        """The mean loss in bits."""
        return self._loss.bits_per_token

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss."""
        return self._loss.perplexity

    @property
    def _loss(self) -> HeldOutLoss:
        return HeldOutLoss(-self.loglikelihood, self.tokens)


def perplexity(
    scorer: Scorer,
    texts: Iterable[str],
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> TextResult:
    """Score documents, each after BOS, every token once; at most the first `limit`.

    A document longer than the model's context is scored in windows (see `scoring.windows`). Memory does not grow with
    the text.
    """

    def documents() -> Iterator[tuple[Pair, int]]:
        for text in texts:
            [pair] = scorer.rolling([text])
            yield pair, len(text.encode())

    return _score_documents(scorer, documents(), limit, batch_size, progress)


def shard_perplexity(
    scorer: Scorer,
    folder: Path,
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> TextResult:
    """`perplexity` of the documents in the validation shards of a folder; bytes are those of the decoded text."""
    manifest = read_manifest(folder)
    if manifest and manifest.tokenizer.fingerprint != scorer.tokenizer.fingerprint:
        raise DataError(f"{folder} was prepared with another tokenizer: pass shards of the model's tokenizer, or text")
    eot_id = None if manifest else scorer.tokenizer.eot_id
    stream, eot_id = open_stream(folder, "val", scorer.model.config.vocab_size, eot_id)

    def documents() -> Iterator[tuple[Pair, int]]:
        tokens = np.empty(len(stream), dtype=stream.dtype)
        stream.copy(0, tokens)
        for document in np.split(tokens, np.flatnonzero(tokens == eot_id))[1:]:
            ids: list[int] = document[1:].tolist()
            yield Pair([scorer.bos_id], ids), len(scorer.tokenizer.decode(ids).encode())

    return _score_documents(scorer, documents(), limit, batch_size, progress)


def _score_documents(
    scorer: Scorer,
    documents: Iterator[tuple[Pair, int]],
    limit: int | None,
    batch_size: int | None,
    progress: Progress | None,
) -> TextResult:
    """Score (document, bytes) pairs in chunks; empty documents are only counted."""
    if limit is not None and limit < 1:
        raise ConfigError(f"expected limit of at least 1, got {limit}")
    progress = progress or NoProgress()
    chunk: list[Pair] = []
    num_documents = num_tokens = num_bytes = chunk_tokens = 0
    sums: list[float] = []

    def score_chunk() -> None:
        sums.extend(score.loglikelihood for score in scorer.score(chunk, batch_size=batch_size, progress=progress))
        chunk.clear()

    progress.start(None, "tokens")
    try:
        for pair, size in documents:
            num_documents += 1
            num_tokens += len(pair.continuation)
            num_bytes += size
            if pair.continuation:
                chunk.append(pair)
                chunk_tokens += len(pair.continuation)
            if chunk_tokens >= CHUNK_TOKENS:
                score_chunk()
                chunk_tokens = 0
            if num_documents == limit:
                break
        if not num_tokens:
            raise DataError(f"expected text to score, got {num_documents} documents without tokens")
        score_chunk()
        progress.finish()
    finally:
        progress.close()
    return TextResult(documents=num_documents, tokens=num_tokens, bytes=num_bytes, loglikelihood=math.fsum(sums))
