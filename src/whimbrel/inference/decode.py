"""Text token by token: read the prompts once, then one token of each text at a time over the cache."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor

from whimbrel.base.errors import RequestError
from whimbrel.cache import DynamicCache
from whimbrel.inference.detokenizer import TextStream
from whimbrel.inference.sampling import History, SampleRNG, SamplingParams, log_probabilities, sample
from whimbrel.inference.sequence import Logprob
from whimbrel.models import GPT, KVStore

__all__ = [
    "Text",
    "checked_prompt",
    "checked_stops",
    "decode_n",
    "decode_one",
    "prefill",
    "read_ids",
    "score_tokens",
    "stream",
]

_Context = contextlib.AbstractContextManager[object]


@dataclass(slots=True)
class Text:
    """One text under way."""

    ids: list[int]
    """The prompt and what was drawn."""
    sampling: SamplingParams
    """How each token is drawn."""
    rng: SampleRNG
    """What decides which."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it, and are not part of it."""
    words: TextStream | None = None
    """Makes text of the tokens, and finds stop strings in it."""
    pieces: list[str] = field(default_factory=list)
    """The text after the prompt, where there are `words` to make it."""
    scores: list[Logprob] = field(default_factory=list)
    """How likely each token was, where that was asked for."""
    finish: Literal["stop", "length"] | None = None
    """Why it ended."""
    prompt: int = field(init=False)
    """How many of the ids are the prompt: those that it began with."""

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)

    @property
    def history(self) -> History:
        """What penalties count."""
        return History(self.ids, self.prompt)

    def take(self, token: int, score: Logprob | None = None) -> None:
        """Go on with a token, or end with it."""
        if token in self.stop_ids:
            self.finish = "stop"
            return
        self.ids.append(token)
        if score is not None:
            self.scores.append(score)
        if self.words is not None:
            self.pieces.append(self.words.push(token))
            if self.words.stopped:
                self.finish = "stop"


def stream(
    model: GPT,
    prompt_ids: Sequence[int] | Tensor,
    sampling: SamplingParams,
    *,
    max_new_tokens: int,
    seed: int | None = None,
    eos_id: int | Collection[int] | None = None,
    cache: str = "none",
) -> Iterator[int]:
    """`generate`, handing out each token as it is drawn. What is asked is checked at once, not at the first token."""
    ids = checked_prompt(model, prompt_ids)
    sampling.check_vocabulary(model.config.vocab_size)
    text = Text(ids, sampling, SampleRNG(seed), checked_stops(eos_id))
    steps = decode_n(model, [text], max_new_tokens, cache=cache)
    return (text.ids[-1] for _ in steps if text.finish != "stop")


def decode_n(
    model: GPT, texts: Sequence[Text], count: int, *, logprobs: int | None = None, cache: str = "none"
) -> Iterator[list[Text]]:
    """Draw up to `count` tokens for each of `texts` side by side; after each step, the texts that took part in it.

    A text that ends leaves the others alone, and one that fills the model's context goes on from the newest half of
    what it holds. `logprobs` scores every token, with that many of the likeliest beside it. `cache` is how keys and
    values are stored: as they are (none), or coded (fp8, int8, int4).
    """
    if count < 1:
        raise RequestError(f"max_new_tokens = {count} must be at least 1")
    return _decode(_Reader(model, cache), list(texts), count, logprobs)


def _decode(reader: _Reader, texts: list[Text], count: int, logprobs: int | None) -> Iterator[list[Text]]:
    context = reader.model.config.context_length
    logits_BV = reader.read([text.ids[-context:] for text in texts])
    for left in reversed(range(count)):
        tokens_B = sample(
            logits_BV,
            [text.sampling for text in texts],
            [0 if text.sampling.greedy else text.rng.key() for text in texts],
            [text.history for text in texts],
        )
        scores = [None] * len(texts) if logprobs is None else score_tokens(logits_BV, tokens_B, logprobs)
        for text, token, score in zip(texts, tokens_B.tolist(), scores, strict=True):
            text.take(token, score)
            if left == 0 and text.finish is None:
                text.finish = "length"
        yield texts
        going = [row for row, text in enumerate(texts) if text.finish is None]
        if not going:
            return
        if len(going) < len(texts):
            texts, tokens_B = [texts[row] for row in going], tokens_B[going]
            reader.keep(going)
        if reader.is_full:
            windows = (_newest(text.ids, reader.held(row) + 1, context) for row, text in enumerate(texts))
            logits_BV = reader.read(list(windows))
        else:
            logits_BV = reader.advance(tokens_B)


def score_tokens(logits_BV: Tensor, tokens_B: Tensor, top: int) -> list[Logprob | None]:
    """The score of each row's token, with `top` of the likeliest beside it."""
    return [Logprob(logprob, tuple(best)) for logprob, best in log_probabilities(logits_BV, tokens_B, top)]


def _newest(ids: list[int], count: int, context: int) -> list[int]:
    """The newest `count` tokens, or half a context of them where that is more than it has room for."""
    return ids[-count:] if count <= context else ids[-max(1, context // 2) :]


class _Reader:
    """Texts side by side in one cache, shorter ones padded at the left."""

    def __init__(self, model: GPT, codec: str) -> None:
        self.model, self.codec = model, codec
        self._padding: list[int] = []
        self._cache = DynamicCache(model.config, codec=codec)

    @property
    def is_full(self) -> bool:
        """Whether the longest text has filled the context."""
        return self._cache.get_seq_length() == self.model.config.context_length

    def held(self, row: int) -> int:
        """How many tokens of a text the cache holds."""
        return self._cache.get_seq_length() - self._padding[row]

    def read(self, windows: Sequence[Sequence[int]]) -> Tensor:
        """Start over with these tokens; those that are the same in several texts are read once."""
        places = {window: place for place, window in enumerate(dict.fromkeys(map(tuple, windows)))}
        longest = max(map(len, places))
        padding = [longest - len(window) for window in places]
        self._cache = DynamicCache(self.model.config, codec=self.codec, padding=padding if any(padding) else None)
        padded = [[0] * missing + list(window) for missing, window in zip(padding, places, strict=True)]
        logits_PV = prefill(self.model, torch.tensor(padded), self._cache)
        rows = [places[tuple(window)] for window in windows]
        self._padding = [padding[row] for row in rows]
        if len(places) == len(rows):
            return logits_PV
        self._cache.reorder(rows)
        return logits_PV[rows]

    def advance(self, tokens_B: Tensor) -> Tensor:
        """Read one more token of each text."""
        return decode_one(self.model, tokens_B, self._cache)

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows alone."""
        self._cache.reorder(rows)
        self._padding = [self._padding[row] for row in rows]


def prefill(model: GPT, ids_BT: Tensor, cache: KVStore) -> Tensor:
    """Read tokens into a cache; the logits (B, V) of what comes next in each row."""
    return read_ids(model, ids_BT, cache, logits_to_keep=1)[:, -1]


def decode_one(model: GPT, tokens_B: Tensor, cache: KVStore) -> Tensor:
    """Read one more token of each row; the logits (B, V) of what comes next."""
    return prefill(model, tokens_B[:, None], cache)


def read_ids(model: GPT, ids_BT: Tensor, cache: KVStore, *, logits_to_keep: int | None = None) -> Tensor:
    """Read tokens into a cache; the logits (B, T, V) after each, or after the last ones."""
    with torch.inference_mode(), _eager():
        ids_BT = ids_BT.to(model.lm_head.weight.device)
        return cast(Tensor, model(ids_BT, cache=cache, logits_to_keep=logits_to_keep).logits)


def _eager() -> _Context:
    """Run compiled blocks as they are written: every new length would cost a model in training another compilation."""
    compiling = "torch._dynamo" in sys.modules
    return cast(_Context, torch.compiler.set_stance("force_eager")) if compiling else contextlib.nullcontext()


def checked_stops(eos_id: int | Iterable[int] | None) -> frozenset[int]:
    """The tokens that end a text, however many were given."""
    return frozenset([eos_id] if isinstance(eos_id, int) else eos_id or ())


def checked_prompt(model: GPT, prompt_ids: Sequence[int] | Tensor) -> list[int]:
    """A prompt as a list of ids that the model has."""
    vocab_size = model.config.vocab_size
    try:
        prompt = torch.as_tensor(prompt_ids, device="cpu")
    except (TypeError, ValueError) as error:
        raise RequestError(f"prompt_ids must be a flat, non-empty list of token ids, not {prompt_ids!r:.60}") from error
    if prompt.dim() != 1 or prompt.numel() == 0 or prompt.is_floating_point() or prompt.dtype == torch.bool:
        raise RequestError(f"prompt_ids of shape {tuple(prompt.shape)} must be a flat, non-empty list of token ids")
    ids: list[int] = prompt.tolist()
    strange = next((i for i in ids if not 0 <= i < vocab_size), None)
    if strange is not None:
        raise RequestError(f"token id {strange} is outside the model's vocabulary: ids run from 0 to {vocab_size - 1}")
    return ids
