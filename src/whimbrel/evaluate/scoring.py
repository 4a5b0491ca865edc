"""Log-likelihoods of continuations: `score` for token ids, `Scorer` for text.

Every evaluation reduces to this: an answer given its question, a document given BOS. The inference engine runs the
model, as for text generation; the LM head runs only at scored positions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from whimbrel.base.errors import ConfigError, DataError, PrecisionError
from whimbrel.base.progress import NoProgress, Progress
from whimbrel.inference import Engine, EngineConfig, Request, encode_prompt
from whimbrel.model_io import LoadedModel, load
from whimbrel.models import GPT
from whimbrel.tokenization import DEFAULT_CHAT_TEMPLATE, ChatTemplate, Tokenizer

__all__ = ["Pair", "Score", "Scorer", "Window", "is_truncated", "score", "windows"]

MAX_BATCH_TOKENS = 2**16
"""Maximum number of tokens of one forward pass."""
MAX_LOGITS = {"cpu": 2**26, "cuda": 2**28}
"""Maximum number of logits of one forward pass, by device type: 256 MiB and 1 GiB in fp32."""


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

    def request(self) -> Request:
        """A request to the engine that only scores the targets."""
        ids = (*self.inputs, self.targets[-1])
        return Request(
            prompt_ids=ids, max_new_tokens=0, prompt_logprobs=1, prompt_logprobs_start=len(ids) - len(self.targets)
        )


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


def score(
    model: GPT, pairs: Sequence[Pair], *, batch_size: int | None = None, progress: Progress | None = None
) -> list[Score]:
    """Score pairs with the inference engine, in the given order; the composition of batches affects only rounding.

    Log-probabilities are computed in fp32 and summed in fp64. `batch_size` limits the number of sequences in a forward
    pass. Long windows come first, so that the windows of a batch have similar lengths and an out-of-memory error occurs
    early; then batches of half the size are tried. `progress` counts tokens.
    """
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size: expected at least 1, got {batch_size}")
    progress = progress or NoProgress()
    if any(not pair.context or not pair.continuation for pair in pairs):
        raise DataError("expected at least one token in each context and continuation")
    remaining = [
        (index, window) for index, pair in enumerate(pairs) for window in windows(pair, model.config.context_length)
    ]
    remaining.sort(key=lambda each: len(each[1].inputs), reverse=True)
    device_type = model.token_embedding.weight.device.type
    max_logits = MAX_LOGITS.get(device_type, MAX_LOGITS["cpu"])
    max_tokens = min(MAX_BATCH_TOKENS, max(1, max_logits // model.config.padded_vocab_size))
    sums, greedy = [0.0] * len(pairs), [True] * len(pairs)
    while remaining:
        max_batch = min(batch_size or max_tokens, max_tokens, len(remaining))
        done: set[int] = set()
        try:
            for position, window_score in _score_windows(
                model, [window for _, window in remaining], max_batch, max_tokens
            ):
                done.add(position)
                index, window = remaining[position]
                sums[index] += window_score.loglikelihood
                greedy[index] &= window_score.is_greedy
                progress.advance(len(window.inputs))
        except torch.OutOfMemoryError:
            if max_tokens == 1:
                raise
            max_tokens //= 2
        remaining = [each for position, each in enumerate(remaining) if position not in done]
    return [Score(*each) for each in zip(sums, greedy, strict=True)]


def _score_windows(
    model: GPT, sequences: Sequence[Window], max_batch: int, max_tokens: int
) -> Iterator[tuple[int, Score]]:
    """Run windows through an engine; yields each window's index in `sequences` and its score as soon as it is known."""
    longest = max(len(window.inputs) for window in sequences)
    block_size = EngineConfig().block_size
    config = EngineConfig(
        max_batch=max_batch,
        prefill_chunk=max_tokens,
        # One batch of sequences, whose last blocks are partly filled: all of them finish before the next one starts.
        num_blocks=-(-max(max_tokens, longest) // block_size) + 2 * max_batch + 1,
        prefix_cache=False,
        cuda_graphs=False,  # nothing is decoded
    )
    engine = Engine(model, config)
    positions = {engine.add_request(window.request()): position for position, window in enumerate(sequences)}
    while engine.busy:
        for event in engine.step():
            if event.prompt is not None:
                position = positions[event.request_id]
                window = sequences[position]
                scores = event.prompt[-len(window.targets) :]
                logprobs = [each.logprob for each in scores if each.logprob is not None]
                if any(map(math.isnan, logprobs)):
                    raise PrecisionError("the model returned NaN logits: try another dtype, or check its weights")
                is_greedy = all(token == each.top[0][0] for token, each in zip(window.targets, scores, strict=True))
                yield position, Score(math.fsum(logprobs), is_greedy)


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores text with a model. Text is tokenized as in lm-eval, so that log-likelihoods are comparable."""

    model: GPT
    tokenizer: Tokenizer
    bos_id: int
    """The token before a text without context: BOS, or EOS if there is none."""
    parse_special: bool = True
    """Whether special tokens in a text are parsed, as in lm-eval, or treated as plain text."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a generated answer, in addition to the tokenizer's end-of-text token."""
    chat_template: ChatTemplate = DEFAULT_CHAT_TEMPLATE

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        quantize: str | None = None,
        parse_special: bool = True,
    ) -> Scorer:
        """Load a model and its tokenizer; see `whimbrel.model_io.load`."""
        loaded = load(path, base=base, tokenizer=tokenizer, device=device, dtype=dtype, quantize=quantize)
        return cls.from_loaded(loaded, parse_special=parse_special)

    @classmethod
    def from_loaded(cls, loaded: LoadedModel, *, parse_special: bool = True) -> Scorer:
        """A scorer for what `whimbrel.model_io.load` returned."""
        return cls(
            loaded.model,
            loaded.tokenizer,
            loaded.generation_config.bos_token_id,
            parse_special,
            frozenset(loaded.generation_config.eos_token_ids),
            loaded.chat_template or DEFAULT_CHAT_TEMPLATE,
        )

    def encode_pairs(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
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

    def encode_prompt(self, text: str) -> list[int]:
        """Tokenize a prompt, with the special tokens that the tokenizer adds; BOS if it is empty."""
        return self._drop_second_bos(
            encode_prompt(self.tokenizer, text, parse_special=self.parse_special, bos_id=self.bos_id).ids
        )

    def encode_documents(self, texts: Sequence[str]) -> list[Pair]:
        """Tokenize documents, each with BOS as its context."""
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
        return [self._drop_second_bos(ids) for ids, _ in encoded]

    def _drop_second_bos(self, ids: list[int]) -> list[int]:
        """The text of a chat template may start with BOS already, to which the tokenizer adds another."""
        return ids[1:] if ids[:2] == [self.bos_id] * 2 else ids
