"""How well a model expects a text: bits per byte, bits per token, perplexity."""

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
from whimbrel.evaluate.scoring import Pair
from whimbrel.evaluate.subject import Subject

__all__ = ["TextResult", "perplexity", "shard_perplexity"]

TOKENS_TOGETHER = 2**18
"""Documents are gathered up to this many tokens before they are scored, longest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextResult:
    """What a model made of a text."""

    documents: int
    tokens: int
    bytes: int
    """Of the text in UTF-8."""
    loglikelihood: float
    """Of all documents together, in nats."""

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers: the size that the model could pack a byte of the text into."""
        return -self.loglikelihood / math.log(2) / self.bytes

    @property
    def bits_per_token(self) -> float:
        """The mean loss, in bits."""
        return -self.loglikelihood / math.log(2) / self.tokens

    @property
    def perplexity(self) -> float:
        """Among how many tokens the model is as good as undecided."""
        loss = -self.loglikelihood / self.tokens
        return math.exp(loss) if loss < 700 else math.inf


def perplexity(
    subject: Subject,
    texts: Iterable[str],
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> TextResult:
    """Score documents, each on its own after the token that opens a text; every token once.

    One longer than the model's context is read in windows: each begins with the last token of the one before, and the
    last is filled up from the left. `limit` takes the first documents only. Memory does not grow with the text.
    """

    def read() -> Iterator[tuple[Pair, int]]:
        for text in texts:
            [pair] = subject.rolling([text])
            yield pair, len(text.encode())

    return _total(subject, read(), limit, batch_size, progress)


def shard_perplexity(
    subject: Subject,
    folder: Path,
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> TextResult:
    """`perplexity` of the documents in the held-out token shards of a folder; bytes are those that they decode to."""
    manifest = read_manifest(folder)
    if manifest and manifest.tokenizer.fingerprint != subject.tokenizer.fingerprint:
        raise DataError(f"{folder} was not made with the model's tokenizer: give shards that were, or text")
    eot_id = None if manifest else subject.tokenizer.eot_id
    stream, eot_id = open_stream(folder, "val", subject.model.config.vocab_size, eot_id)

    def read() -> Iterator[tuple[Pair, int]]:
        tokens = np.empty(len(stream), dtype=stream.dtype)
        stream.copy(0, tokens)
        for document in np.split(tokens, np.flatnonzero(tokens == eot_id))[1:]:
            ids: list[int] = document[1:].tolist()
            yield Pair([subject.opener_id], ids), len(subject.tokenizer.decode(ids).encode())

    return _total(subject, read(), limit, batch_size, progress)


def _total(
    subject: Subject,
    documents: Iterator[tuple[Pair, int]],
    limit: int | None,
    batch_size: int | None,
    progress: Progress | None,
) -> TextResult:
    """Score documents a batch of them at a time; those without a token count only as documents."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit = {limit} must be at least 1")
    shown, waiting = progress or NoProgress(), list[Pair]()
    count = tokens = size = held = 0
    sums: list[float] = []

    def flush() -> None:
        sums.extend(score.loglikelihood for score in subject.score(waiting, batch_size=batch_size, progress=shown))
        waiting.clear()

    shown.start(None, "tokens")
    try:
        for pair, length in documents:
            count, tokens, size = count + 1, tokens + len(pair.continuation), size + length
            if pair.continuation:
                waiting.append(pair)
                held += len(pair.continuation)
            if held >= TOKENS_TOGETHER:
                flush()
                held = 0
            if count == limit:
                break
        if not tokens:
            raise DataError(f"{count} documents hold no token: there is nothing to score")
        flush()
        shown.finish()
    finally:
        shown.close()
    return TextResult(documents=count, tokens=tokens, bytes=size, loglikelihood=math.fsum(sums))
