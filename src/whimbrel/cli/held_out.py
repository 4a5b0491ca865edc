"""The loss of a model on text that it was not trained on: token shards, or documents that are tokenised here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whimbrel.base.errors import ConfigError, DataError

if TYPE_CHECKING:
    from whimbrel.model_io.measure import Measured
    from whimbrel.models import GPT
    from whimbrel.tokenization import Tokenizer

__all__ = ["HeldOut", "held_out_loss", "read_shards", "read_text"]

TOKENS_AT_ONCE = 8192
"""Tokens of one forward pass, or one sequence where that is longer."""


class HeldOut(NamedTuple):
    """Tokens with the one after them, the token that opens a document, and what they are, for people."""

    ids: NDArray[Any]
    eot_id: int
    name: str


def read_shards(path: Path, tokenizer: Tokenizer | None, vocab_size: int, most: int) -> HeldOut:
    """The first tokens of the held-out shards in a folder."""
    from whimbrel.data import read_manifest
    from whimbrel.data.shards import open_stream

    manifest = read_manifest(path)
    if manifest and tokenizer and manifest.tokenizer.fingerprint != tokenizer.fingerprint:
        raise DataError(f"{path} was not made with the model's tokenizer: give shards that were, or text")
    stream, eot_id = open_stream(path, "val", vocab_size, tokenizer.eot_id if tokenizer and not manifest else None)
    ids = np.empty(min(most + 1, len(stream)), dtype=stream.dtype)
    stream.copy(0, ids)
    return HeldOut(ids, eot_id, path.name)


def read_text(source: str, tokenizer: Tokenizer | None, most: int) -> HeldOut:
    """The first tokens of the documents of a source, each opened by end-of-text."""
    from whimbrel.data.sources import documents

    if tokenizer is None:
        raise ConfigError(f"the model has no tokenizer to read {source} with: give token shards as held-out data")
    pieces, count = [], 0
    for text in documents([source]):
        pieces += tokenizer.encode_documents([text])
        count += len(pieces[-1])
        if count > most:
            break
    ids = np.concatenate([np.empty(0, dtype=tokenizer.dtype), *pieces])
    return HeldOut(ids[: most + 1], tokenizer.eot_id, Path(source).name)


def held_out_loss(held: HeldOut, length: int, *, join: bool = True) -> Callable[[GPT], Measured]:
    """What measures a model on whole sequences of `length` tokens; unless `join`, documents do not see each other."""
    import torch

    from whimbrel.data import document_ids
    from whimbrel.model_io.measure import Measured

    ids, length = held.ids, min(length, len(held.ids) - 1)
    if length < 1:
        raise DataError(f"{held.name} holds {len(ids)} tokens: a loss needs two at least")
    rows = (len(ids) - 1) // length
    inputs = torch.from_numpy(ids[: rows * length].astype(np.int64)).view(rows, length)
    targets = torch.from_numpy(ids[1 : rows * length + 1].astype(np.int64)).view(rows, length)

    def measure(model: GPT) -> Measured:
        device, losses = model.token_embedding.weight.device, []
        step = max(1, TOKENS_AT_ONCE // length)
        with torch.inference_mode():
            for x, y in zip(inputs.to(device).split(step), targets.to(device).split(step), strict=True):
                documents = None if join else document_ids(x, held.eot_id)
                losses.append(float(model(x, targets=y, documents=documents, num_items_in_batch=1.0).loss))
        return Measured(math.fsum(losses) / (rows * length), rows * length, length, held.name)

    return measure
