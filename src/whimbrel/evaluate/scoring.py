"""Log-likelihoods of continuations: `score` for token ids, `Scorer` for text.

Every evaluation reduces to this: an answer given its question, a document given BOS. Sequences are padded on
the right, where causal attention never looks, so no mask is needed; and the head runs only at scored positions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from whimbrel.base.errors import ConfigError, DataError, PrecisionError
from whimbrel.base.progress import NoProgress, Progress
from whimbrel.model_io import load
from whimbrel.models import GPT
from whimbrel.tokenization import Tokenizer

__all__ = ["Pair", "Score", "Scorer", "Window", "is_truncated", "score", "windows"]

MAX_BATCH_TOKENS = {"cuda": 2**16}
"""Tokens of one forward pass without `batch_size`, by device type; 8192 on other devices."""
MAX_LOGITS = 2**26
"""Logits in memory at a time: 256 MiB in fp32."""


class Pair(NamedTuple):
    """A continuation to score, and its context of at least one token."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The score of a continuation."""

    loglikelihood: float
    """Log-probability after the context, in nats."""
    is_greedy: bool
    """Whether greedy decoding would generate it."""


class Window(NamedTuple):
    """One sequence of a forward pass; the targets are the tokens after its last inputs."""

    inputs: Sequence[int]
    targets: Sequence[int]


def windows(pair: Pair, length: int) -> Iterator[Window]:
    """Windows of at most `length` inputs that score each token of the continuation once.

    A pair that fits is one window; a context that is too long is truncated on the left. A longer continuation is
    scored in consecutive windows, the last of which is extended to the left so that it has the maximum context.
    """
    ids, end = [*pair.context, *pair.continuation], len(pair.context)
    while end < len(ids):
        begin, end = end, min(end + length, len(ids))
        yield Window(ids[max(0, end - 1 - length) : end - 1], ids[begin:end])


def is_truncated(pair: Pair, length: int) -> bool:
    """Whether a pair does not fit into a context of `length` tokens."""
    return len(pair.context) + len(pair.continuation) > length + 1


@torch.inference_mode()
def score(
    model: GPT, pairs: Sequence[Pair], *, batch_size: int | None = None, progress: Progress | None = None
) -> list[Score]:
    """Score pairs, in the given order; the composition of batches affects only rounding.

    Long windows come first, so that the windows of a batch have similar lengths and an out-of-memory error occurs
    early; then the batch size is halved. `progress` counts tokens.
    """
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"expected batch_size of at least 1, got {batch_size}")
    progress = progress or NoProgress()
    if any(not pair.context or not pair.continuation for pair in pairs):
        raise DataError("expected at least one token in each context and continuation")
    indexed = [(index, row) for index, pair in enumerate(pairs) for row in windows(pair, model.config.context_length)]
    indexed.sort(key=lambda each: len(each[1].inputs), reverse=True)
    max_tokens = MAX_BATCH_TOKENS.get(model.token_embedding.weight.device.type, 2**13)
    sums, greedy = [0.0] * len(pairs), [True] * len(pairs)
    done, max_windows = 0, batch_size or len(indexed)
    while done < len(indexed):
        size = max_windows if batch_size else min(max_windows, max(1, max_tokens // len(indexed[done][1].inputs)))
        batch = indexed[done : done + size]
        try:
            scores = _score_windows(model, [window for _, window in batch])
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
            max_windows = len(batch) // 2
            continue
        for (index, window), (loglikelihood, is_greedy) in zip(batch, scores, strict=True):
            sums[index] += loglikelihood
            greedy[index] &= is_greedy
            progress.advance(len(window.inputs))
        done += len(batch)
    return [Score(*each) for each in zip(sums, greedy, strict=True)]


def _score_windows(model: GPT, batch: Sequence[Window]) -> list[Score]:
    """One forward pass."""
    device, width = model.token_embedding.weight.device, max(len(window.inputs) for window in batch)
    inputs_BT = torch.zeros(len(batch), width, dtype=torch.int64)
    positions = []
    for index, window in enumerate(batch):
        inputs_BT[index, : len(window.inputs)] = torch.tensor(window.inputs)
        end = index * width + len(window.inputs)
        positions.append(torch.arange(end - len(window.targets), end))
    counts = [len(window.targets) for window in batch]
    targets_N = torch.tensor([token for window in batch for token in window.targets], device=device)
    hidden_NC = model.hidden_states(inputs_BT.to(device)).flatten(0, 1)[torch.cat(positions).to(device)]
    step = max(1, MAX_LOGITS // model.config.padded_vocab_size)
    parts = [_score_tokens(model, *part) for part in zip(hidden_NC.split(step), targets_N.split(step), strict=True)]
    logs_N, is_greedy_N = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    if logs_N.isnan().any():
        raise PrecisionError("the model returned NaN logits: try another dtype, or check its weights")
    each = zip(logs_N.split(counts), is_greedy_N.split(counts), strict=True)
    return [Score(float(logs.sum()), bool(is_greedy.all())) for logs, is_greedy in each]


def _score_tokens(model: GPT, hidden_NC: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each target, from fp32 logits in fp64, and whether it is the argmax."""
    logits_NV = model.logits(hidden_NC).float()
    chosen_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
    return (chosen_N - logits_NV.logsumexp(1)).cpu().double(), logits_NV.argmax(1) == targets_N


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores text with a model. Text is tokenized as in lm-eval, so that log-likelihoods are comparable."""

    model: GPT
    tokenizer: Tokenizer
    bos_id: int
    """The token before a text without context: BOS, or EOS if there is none."""
    parse_special: bool = True
    """Whether special tokens in a text are parsed, as in lm-eval, or treated as plain text."""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        quantize: str | None = None,
        parse_special: bool = True,
    ) -> Scorer:
        """Load a model and its tokenizer; see `whimbrel.model_io.load`."""
        loaded = load(path, tokenizer=tokenizer, device=device, dtype=dtype, quantize=quantize)
        return cls(loaded.model, loaded.tokenizer, loaded.generation_config.bos_token_id, parse_special)

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """Tokenize (context, continuation) texts.

        Both are encoded as one text, because tokens may span the boundary, and split after the tokens of the context
        alone. Whitespace at the end of a context moves to the continuation. An empty context is the BOS token.
        """
        moved = [(context.rstrip(), context[len(context.rstrip()) :] + text) for context, text in texts]
        contexts = self._encode([context for context, _ in moved], add_special_tokens=True)
        joined = self._encode([context + text for context, text in moved], add_special_tokens=True)
        without_context = iter(self._encode([text for context, text in moved if not context], add_special_tokens=False))
        pairs = [
            Pair(prefix, ids[len(prefix) :]) if context else Pair([self.bos_id], next(without_context))
            for (context, _), prefix, ids in zip(moved, contexts, joined, strict=True)
        ]
        for (context, text), pair in zip(texts, pairs, strict=True):
            if not pair.continuation:
                raise DataError(
                    f"expected at least one token in the continuation {text!r} after {context[-40:]!r}, got none: "
                    "start it with a space"
                )
        return pairs

    def prompt(self, text: str) -> list[int]:
        """Tokenize a prompt, with the special tokens that the tokenizer adds; BOS if it is empty."""
        [ids] = self._encode([text], add_special_tokens=True)
        return ids or [self.bos_id]

    def rolling(self, texts: Sequence[str]) -> list[Pair]:
        """Tokenize complete texts, each after BOS."""
        return [Pair([self.bos_id], ids) for ids in self._encode(texts, add_special_tokens=False)]

    def score(
        self, pairs: Sequence[Pair], *, batch_size: int | None = None, progress: Progress | None = None
    ) -> list[Score]:
        """See the function `score`."""
        return score(self.model, pairs, batch_size=batch_size, progress=progress)

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        encoded = self.tokenizer.encode_prompts(
            texts, parse_special=self.parse_special, add_special_tokens=add_special_tokens
        )
        # The text of a chat template may start with BOS already.
        return [ids[1:] if ids[:2] == [self.bos_id] * 2 else ids for ids, _ in encoded]
