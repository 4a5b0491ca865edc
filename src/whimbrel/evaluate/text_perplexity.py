"""Perplexity and bits per byte of documents, and the loss over sequences of equal length or samples, as in training."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.base.progress import NoProgress, Progress
from whimbrel.data import document_ids, read_manifest
from whimbrel.data.conversations import ConversationReader, detect_format
from whimbrel.data.packing import SAMPLES_FILE, PackedRows, TokenizedSamples, tokenize_samples
from whimbrel.data.shards import TokenStream, open_stream
from whimbrel.data.sources import iter_documents, resolve_source
from whimbrel.evaluate.scoring import Pair, Scorer
from whimbrel.model_io import HeldOutResult, load_tokenizer, locate_model
from whimbrel.model_io.load import read_config
from whimbrel.model_io.locate import ModelLocation
from whimbrel.models import GPT
from whimbrel.models.held_out_loss import HeldOutLoss, held_out_loss
from whimbrel.tokenization import Tokenizer

__all__ = ["TextResult", "held_out_evaluation", "is_shard_directory", "perplexity", "shard_perplexity"]

CHUNK_TOKENS = 2**18
"""Documents are collected up to this many tokens before they are scored, so that batches have similar lengths."""
READ_TOKENS = 2**20
"""Number of tokens that are read from shards at a time."""
MAX_SEQUENCE_LENGTH = 1024
"""Sequence length of `held_out_evaluation` if it is not given, or the context length if that is shorter."""
BATCH_TOKENS = 8192
"""Tokens of one forward pass of `held_out_evaluation`, or one sequence if that is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextResult:
    """The log-likelihood of a text, and metrics derived from it."""

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
    """Score every token of each document once, after BOS; `limit` is the maximum number of documents.

    A document longer than the model's context is scored in windows (see `scoring.windows`). Memory does not grow with
    the text.
    """

    def documents() -> Iterator[tuple[Pair, int]]:
        for text in texts:
            [pair] = scorer.encode_documents([text])
            yield pair, len(text.encode())

    return _score_documents(scorer, documents(), limit, batch_size, progress)


def shard_perplexity(
    scorer: Scorer,
    directory: Path,
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> TextResult:
    """`perplexity` of the documents in the validation shards of a directory; bytes are counted in the decoded text."""
    stream, eot_id = _open_shards(directory, scorer.tokenizer, scorer.model.config.vocab_size)

    def documents() -> Iterator[tuple[Pair, int]]:
        for ids in _split_documents(stream, eot_id):
            yield Pair([scorer.bos_id], ids), len(scorer.tokenizer.decode(ids).encode())

    return _score_documents(scorer, documents(), limit, batch_size, progress)


def _split_documents(stream: TokenStream, eot_id: int) -> Iterator[list[int]]:
    """The documents of a token stream, each without the end-of-text token before it; reads a part at a time."""
    unfinished = np.empty(0, dtype=stream.dtype)  # the document that the next part continues, if any
    for start in range(0, len(stream), READ_TOKENS):
        part = np.empty(min(READ_TOKENS, len(stream) - start), dtype=stream.dtype)
        stream.copy(start, part)
        tokens = np.concatenate((unfinished, part))
        starts = np.flatnonzero(tokens == eot_id).tolist()
        for first, end in pairwise(starts):
            yield tokens[first + 1 : end].tolist()
        unfinished = tokens[starts[-1] :] if starts else tokens[:0]
    if len(unfinished):
        yield unfinished[1:].tolist()


def _score_documents(
    scorer: Scorer,
    documents: Iterator[tuple[Pair, int]],
    limit: int | None,
    batch_size: int | None,
    progress: Progress | None,
) -> TextResult:
    """Score (document, bytes) pairs in chunks; empty documents are only counted."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit: expected at least 1, got {limit}")
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


class _HeldOutTokens(NamedTuple):
    """Held-out data: token ids, the token that starts each document, and a name."""

    ids: NDArray[Any]
    eot_id: int
    name: str


def held_out_evaluation(
    model: str | os.PathLike[str],
    data: str,
    *,
    base: str | os.PathLike[str] | None = None,
    max_tokens: int,
    sequence_length: int | None = None,
    mask_documents: bool = False,
) -> Callable[[GPT], HeldOutResult]:
    """A function that computes the mean loss of a model on `data`.

    `data` is validation shards, text (as in `prepare`), conversations or preference pairs (as in `finetune`), or a
    directory of TokenizedSamples. The loss is computed as for validation in training: tokens are split into sequences
    of `sequence_length` (default: the context length, at most 1024), and `mask_documents` restricts attention to each
    document. In samples, only supervised tokens count; in preference pairs, only the chosen answers. `model` is the
    path of the model, which is read for its config and tokenizer; `base` is the path of an adapter's base model.
    """
    location = locate_model(model, base)
    config, directory = read_config(location.root).config, location.tokenizer_directory
    tokenizer = None if directory is None else load_tokenizer(directory)
    samples = _read_samples(data, tokenizer, location, config.context_length)
    if samples is not None:
        length = max(sequence_length or min(MAX_SEQUENCE_LENGTH, config.context_length), int(samples.lengths.max()))
        return _samples_evaluation(samples, "/".join(Path(data).parts[-2:]), length, max_tokens)
    if is_shard_directory(data):
        held_out = _read_shards(Path(data), tokenizer, config.vocab_size, max_tokens)
    else:
        held_out = _read_text(data, tokenizer, max_tokens)
    ids = held_out.ids
    length = min(sequence_length or min(MAX_SEQUENCE_LENGTH, config.context_length), len(ids) - 1)
    if length < 1:
        raise DataError(f"expected at least 2 held-out tokens, got {len(ids)} in {held_out.name}")
    num_sequences = (len(ids) - 1) // length
    inputs = torch.from_numpy(ids[: num_sequences * length].astype(np.int64)).view(num_sequences, length)
    targets = torch.from_numpy(ids[1 : num_sequences * length + 1].astype(np.int64)).view(num_sequences, length)

    def batches(device: torch.device) -> Iterator[dict[str, Any]]:
        step = max(1, BATCH_TOKENS // length)
        for x, y in zip(inputs.to(device).split(step), targets.to(device).split(step), strict=True):
            documents = document_ids(x, held_out.eot_id) if mask_documents else None
            yield {"input_ids": x, "targets": y, "documents": documents}

    def evaluate(model: GPT) -> HeldOutResult:
        result = held_out_loss(model, batches(model.token_embedding.weight.device))
        return HeldOutResult(result.loss, result.num_tokens, length, held_out.name)

    return evaluate


def _read_samples(
    data: str, tokenizer: Tokenizer | None, location: ModelLocation, context_length: int
) -> TokenizedSamples | None:
    """The samples in `data`, without the rejected answers of preference pairs; None if it is text or shards."""
    if (Path(data) / SAMPLES_FILE).is_file():
        samples = TokenizedSamples.load(data)
    elif tokenizer is None or is_shard_directory(data) or not _has_conversations(data):
        return None
    else:
        template = location.chat_template()
        samples = tokenize_samples(ConversationReader([data]), tokenizer, template, max_tokens=context_length)
    if not samples.pair:
        return samples
    both = samples.select(np.arange(len(samples) // 2))
    both.pair = False
    return both.select(np.arange(0, len(both), 2))


def _has_conversations(data: str) -> bool:
    """Whether the first row has the fields of a fine-tuning format other than text."""
    row = next((row.value for source in resolve_source(data)[:1] for row in source.rows()), None)
    return isinstance(row, dict) and detect_format(row) not in (None, "text")


def _samples_evaluation(
    samples: TokenizedSamples, name: str, length: int, max_tokens: int
) -> Callable[[GPT], HeldOutResult]:
    """Evaluate on packed samples: as many sequences as `max_tokens` tokens need."""
    rows = PackedRows(samples, length, pad_id=0)
    num_rows, step = min(len(rows), -(-max_tokens // length)), max(1, BATCH_TOKENS // length)

    def batches(device: torch.device) -> Iterator[dict[str, Any]]:
        for start in range(0, num_rows, step):
            batch = [rows[index] for index in range(start, min(start + step, num_rows))]
            yield {key: torch.from_numpy(np.stack([row[key] for row in batch])).to(device) for key in batch[0]}

    def evaluate(model: GPT) -> HeldOutResult:
        result = held_out_loss(model, batches(model.token_embedding.weight.device))
        return HeldOutResult(result.loss, result.num_tokens, length, name)

    return evaluate


def is_shard_directory(source: str) -> bool:
    """Whether a source of text is a directory of token shards."""
    return Path(source).is_dir() and any(Path(source).glob("*.bin"))


def _read_shards(directory: Path, tokenizer: Tokenizer | None, vocab_size: int, max_tokens: int) -> _HeldOutTokens:
    """The first `max_tokens` + 1 tokens of the validation shards of a directory."""
    stream, eot_id = _open_shards(directory, tokenizer, vocab_size)
    ids = np.empty(min(max_tokens + 1, len(stream)), dtype=stream.dtype)
    stream.copy(0, ids)
    return _HeldOutTokens(ids, eot_id, directory.name)


def _open_shards(directory: Path, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[TokenStream, int]:
    """The validation shards of a directory and their end-of-text token; raises if another tokenizer prepared them."""
    manifest = read_manifest(directory)
    if manifest and tokenizer and manifest.tokenizer.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{directory} was prepared with a different tokenizer: pass shards of the model's tokenizer, or text"
        )
    return open_stream(directory, "val", vocab_size, tokenizer.eot_id if tokenizer and not manifest else None)


def _read_text(source: str, tokenizer: Tokenizer | None, max_tokens: int) -> _HeldOutTokens:
    """The first `max_tokens` + 1 tokens of a text source."""
    if tokenizer is None:
        raise ConfigError(f"the model has no tokenizer for {source}: pass token shards with --data")
    pieces, count = [], 0
    for text in iter_documents([source]):
        pieces += tokenizer.encode_documents([text])
        count += len(pieces[-1])
        if count > max_tokens:
            break
    ids = np.concatenate([np.empty(0, dtype=tokenizer.dtype), *pieces])
    return _HeldOutTokens(ids[: max_tokens + 1], tokenizer.eot_id, Path(source).name)
