"""How likely a model holds tokens to be: pairs of context and continuation, in batches, each token scored once.

Everything that is evaluated comes down to this: an answer after its question, a whole text after the token that opens
one. Causal attention never looks to the right, so rows are padded there and nothing is masked; and the head is run at
the positions that are scored and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.base.errors import ConfigError, DataError, PrecisionError
from whimbrel.base.progress import NoProgress, Progress
from whimbrel.models import GPT

__all__ = ["Pair", "Score", "Window", "is_cut", "score", "windows"]

TOKENS_AT_ONCE = {"cuda": 2**16}
"""Tokens of one forward pass where no number of rows is given, by device type; 8192 on any other."""
LOGITS_AT_ONCE = 2**26
"""How many logits exist at a time: 256 MiB of them in fp32."""


class Pair(NamedTuple):
    """Tokens to score, and at least one that comes before them."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """What a model makes of a continuation."""

    loglikelihood: float
    """The natural logarithm of its probability after the context."""
    greedy: bool
    """Whether each of its tokens is the likeliest in its place."""


class Window(NamedTuple):
    """One row of a forward pass: what the model reads, and the tokens it has to expect after the last of them."""

    inputs: Sequence[int]
    targets: Sequence[int]


def windows(pair: Pair, length: int) -> Iterator[Window]:
    """Rows of at most `length` inputs that score each token of the continuation once.

    What fits is one row, cut at the left where the context is too long. A longer continuation takes several: each goes
    on where the one before ended, and the last is filled up with what came before, so that it sees all it can.
    """
    whole, end = [*pair.context, *pair.continuation], len(pair.context)
    while end < len(whole):
        begin, end = end, min(end + length, len(whole))
        yield Window(whole[max(0, end - 1 - length) : end - 1], whole[begin:end])


def is_cut(pair: Pair, length: int) -> bool:
    """Whether a model with a context of `length` does not see all of a pair when it scores the end of it."""
    return len(pair.context) + len(pair.continuation) > length + 1


@torch.inference_mode()
def score(
    model: GPT, pairs: Sequence[Pair], *, batch_size: int | None = None, progress: Progress | None = None
) -> list[Score]:
    """The score of each pair, in the order given; neighbours in a batch do not matter, but for the last digits.

    Longest first, so that rows of a batch are about as long as each other, and memory that does not suffice shows at
    once: then batches are halved. `progress` is told of tokens.
    """
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size} must be at least 1")
    shown = progress or NoProgress()
    if any(not pair.context or not pair.continuation for pair in pairs):
        raise DataError("a context or a continuation has no token: both need one at least")
    rows = [(number, row) for number, pair in enumerate(pairs) for row in windows(pair, model.config.context_length)]
    rows.sort(key=lambda numbered: len(numbered[1].inputs), reverse=True)
    budget = TOKENS_AT_ONCE.get(model.token_embedding.weight.device.type, 2**13)
    sums, greedy = [0.0] * len(pairs), [True] * len(pairs)
    done, most = 0, batch_size or len(rows)
    while done < len(rows):
        size = most if batch_size else min(most, max(1, budget // len(rows[done][1].inputs)))
        batch = rows[done : done + size]
        try:
            scores = _score_rows(model, [row for _, row in batch])
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
            most = len(batch) // 2
            continue
        for (number, row), (loglikelihood, likeliest) in zip(batch, scores, strict=True):
            sums[number] += loglikelihood
            greedy[number] &= likeliest
            shown.advance(len(row.inputs))
        done += len(batch)
    return [Score(*each) for each in zip(sums, greedy, strict=True)]


def _score_rows(model: GPT, rows: Sequence[Window]) -> list[Score]:
    """One forward pass."""
    device, width = model.token_embedding.weight.device, max(len(row.inputs) for row in rows)
    inputs_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    places = []
    for number, row in enumerate(rows):
        inputs_BT[number, : len(row.inputs)] = torch.tensor(row.inputs)
        end = number * width + len(row.inputs)
        places.append(torch.arange(end - len(row.targets), end))
    counts = [len(row.targets) for row in rows]
    targets_N = torch.tensor([token for row in rows for token in row.targets], device=device)
    hidden_NC = model.hidden_states(inputs_BT.to(device)).flatten(0, 1)[torch.cat(places).to(device)]
    step = max(1, LOGITS_AT_ONCE // model.config.padded_vocab_size)
    parts = [_score_tokens(model, *part) for part in zip(hidden_NC.split(step), targets_N.split(step), strict=True)]
    logs_N, likeliest_N = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    if logs_N.isnan().any():
        raise PrecisionError("the model answers with numbers that are none (nan): try another dtype, or other weights")
    each = zip(logs_N.split(counts), likeliest_N.split(counts), strict=True)
    return [Score(float(logs.sum()), bool(likeliest.all())) for logs, likeliest in each]


def _score_tokens(model: GPT, hidden_NC: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each target in fp64, made of fp32 logits, and whether it is the likeliest."""
    logits_NV = model.logits(hidden_NC).float()
    chosen_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
    return (chosen_N - logits_NV.logsumexp(1)).cpu().double(), logits_NV.argmax(1) == targets_N
