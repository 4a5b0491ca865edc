"""Speculative decoding: a cheap guess at the next tokens, checked by the model in one step.

Guesses are taken or refused such that what comes out is distributed as if the model had drawn each token itself; greedy
text is the same text. What a guess is worth only decides how fast it goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from whimbrel.base.errors import RequestError
from whimbrel.inference.decode import checked_prompt, checked_stops
from whimbrel.inference.sampling import History, SampleRNG, SamplingParams, distribution, draw, sample
from whimbrel.inference.session import Session
from whimbrel.models import GPT

__all__ = ["Draft", "Guess", "ModelDraft", "NgramDraft", "speculate"]


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may come next."""

    tokens: list[int]
    probabilities: Tensor | None = None
    """(tokens, vocabulary): what each was drawn from; None where they were not drawn but are certain."""


class Draft(Protocol):
    """What guesses."""

    def guess(self, text: History, count: int, sampling: SamplingParams, rng: SampleRNG) -> Guess:
        """At most `count` tokens to follow `text`, which goes on from what it was the time before."""


class NgramDraft:
    """Guesses that what followed the newest tokens earlier in the text follows them again."""

    def __init__(self, longest: int = 3) -> None:
        if longest < 1:
            raise RequestError(f"longest = {longest} must be at least 1: so many tokens are looked up")
        self._longest = longest
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def guess(self, text: History, count: int, sampling: SamplingParams, rng: SampleRNG) -> Guess:
        """What followed the longest run of newest tokens that was seen before, when it was seen last."""
        ids = text.tokens
        for end in range(self._known, len(ids)):
            for size in range(1, min(self._longest, end) + 1):
                self._after[tuple(ids[end - size : end])] = end
        self._known = len(ids)
        runs = (tuple(ids[-size:]) for size in range(min(self._longest, len(ids)), 0, -1))
        place = next((self._after[run] for run in runs if run in self._after), len(ids))
        return Guess(list(ids[place : place + count]))


class ModelDraft:
    """Guesses by a smaller model with the same vocabulary."""

    def __init__(self, model: GPT) -> None:
        self._session = Session(model)
        self._start = 0

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        return self._session.model.config.vocab_size

    def guess(self, text: History, count: int, sampling: SamplingParams, rng: SampleRNG) -> Guess:
        """Tokens as the smaller model would draw them."""
        ids = text.tokens
        context = self._session.model.config.context_length
        count = min(count, context - 1)
        if len(ids) <= self._start:  # another text
            self._start = 0
        if len(ids) - self._start + count - 1 > context:
            self._start = len(ids) - max(1, (context - count) // 2)
        tokens, chances = list(ids), list[Tensor]()
        for _ in range(count):
            logits_1V = self._session.read(tokens[self._start :])
            chances.append(distribution(logits_1V, [sampling], [History(tokens, text.prompt)]))
            tokens.append(int(draw(chances[-1], [0 if sampling.greedy else rng.key()])))
        return Guess(tokens[len(ids) :], torch.cat(chances)) if chances else Guess([])


def speculate(
    session: Session | GPT,
    prompt_ids: Sequence[int] | Tensor,
    sampling: SamplingParams,
    draft: Draft | None = None,
    *,
    max_new_tokens: int,
    ahead: int = 4,
    seed: int | None = None,
    eos_id: int | Collection[int] | None = None,
    cache: str = "none",
) -> Iterator[int]:
    """`stream`, with up to `ahead` tokens guessed by `draft` at each step; none without one.

    A session goes on from what it holds of the prompt already; for a model one is begun, whose cache is stored as
    `cache` says.
    """
    if isinstance(session, GPT):
        session = Session(session, cache=cache, single=True)
    elif cache != "none":
        raise RequestError(f"cache = {cache} is settled where the session is made: Session(model, cache={cache!r})")
    model = session.model
    ids = checked_prompt(model, prompt_ids)
    sampling.check_vocabulary(model.config.vocab_size)
    for name, count in (("max_new_tokens", max_new_tokens), ("ahead", ahead)):
        if count < 1:
            raise RequestError(f"{name} = {count} must be at least 1")
    if isinstance(draft, ModelDraft) and draft.vocab_size != model.config.vocab_size:
        raise RequestError(
            f"the draft model has {draft.vocab_size} tokens and the model {model.config.vocab_size}: they must share "
            "one tokenizer"
        )
    return _speculate(session, ids, sampling, draft, max_new_tokens, ahead, SampleRNG(seed), checked_stops(eos_id))


def _speculate(
    session: Session,
    ids: list[int],
    sampling: SamplingParams,
    draft: Draft | None,
    left: int,
    ahead: int,
    rng: SampleRNG,
    stops: frozenset[int],
) -> Iterator[int]:
    context = session.model.config.context_length
    start = max(0, len(ids) - context)
    text = History(ids, len(ids))  # which grows as the ids do
    while left:
        if len(ids) - start > context:
            start = len(ids) - max(1, context // 2)
        room = min(ahead, left - 1, context - (len(ids) - start))
        guess = draft.guess(text, room, sampling, rng) if draft and room else Guess([])
        logits_KV = session.read(ids[start:] + guess.tokens, keep=len(guess.tokens) + 1)
        for token in _settle(logits_KV, guess, text, sampling, rng):
            if token in stops:
                return
            ids.append(token)
            left -= 1
            yield token


def _settle(logits_KV: Tensor, guess: Guess, text: History, sampling: SamplingParams, rng: SampleRNG) -> list[int]:
    """The guessed tokens that stand, and one more: in place of the first that does not, or after the last."""
    if not guess.tokens:
        return sample(logits_KV, [sampling], [0 if sampling.greedy else rng.key()], [text]).tolist()
    histories = [History([*text.tokens, *guess.tokens[:place]], text.prompt) for place in range(len(guess.tokens) + 1)]
    wanted_KV = distribution(logits_KV, [sampling] * len(histories), histories)
    for place, token in enumerate(guess.tokens):
        wanted_V, chance_V = wanted_KV[place], _chances(guess, place, wanted_KV[place])
        if rng.uniform() * chance_V[token] >= wanted_V[token]:
            missing_V = (wanted_V - chance_V).clamp(min=0)
            rest_V = missing_V / missing_V.sum() if missing_V.any() else wanted_V
            return [*guess.tokens[:place], int(draw(rest_V[None], [rng.key()]))]
    return [*guess.tokens, int(draw(wanted_KV[-1:], [rng.key()]))]


def _chances(guess: Guess, place: int, like_V: Tensor) -> Tensor:
    if guess.probabilities is not None:
        return guess.probabilities[place].to(like_V.device)
    return torch.zeros_like(like_V).index_fill(0, torch.tensor([guess.tokens[place]], device=like_V.device), 1.0)
