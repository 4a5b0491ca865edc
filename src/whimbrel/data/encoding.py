"""Batches of documents to tokens: the one transform that every way of running `prepare` shares."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whimbrel.base.errors import DataError
from whimbrel.data.batches import Batch
from whimbrel.tokenization import Tokenizer

__all__ = ["BatchEncoder", "Encoded", "fingerprint"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of one batch."""

    tokens: NDArray[Any]
    """Its documents end to end."""
    held_out: tuple[NDArray[Any], ...]
    """Those that the hash offers to validation, one by one."""
    documents: int
    """How many documents it had."""
    read: float | None
    """The share of its file that lies before the next batch; None where that is not known."""


@dataclass(frozen=True, slots=True)
class BatchEncoder:
    """Parses and tokenises a batch. Knows nothing of other batches, so any thread or machine may take any of them."""

    tokenizer: Tokenizer
    val_share: float

    def __call__(self, batch: Batch) -> Encoded:
        """The batch's tokens, each document opened by end-of-text."""
        train: list[NDArray[Any]] = [np.empty(0, dtype=self.tokenizer.dtype)]
        held_out: list[NDArray[Any]] = []
        documents = batch.documents()
        for number, text in documents:
            try:
                (tokens,) = self.tokenizer.encode_documents((text,))
            except DataError as error:
                raise DataError(f"{batch.place} {number}: {error}") from error
            offered = self.val_share and int.from_bytes(fingerprint(tokens), "big") < self.val_share * 2**64
            (held_out if offered else train).append(tokens)
        return Encoded(np.concatenate(train), tuple(held_out), len(documents), batch.read)


def fingerprint(tokens: NDArray[Any]) -> bytes:
    """Eight bytes that depend on a document alone, so that equal documents fall on the same side."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()
