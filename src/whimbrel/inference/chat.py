"""A conversation with a model: what was said, as far as the context reaches, over one cache."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Generator, Iterator, Sequence
from typing import NamedTuple

from whimbrel.base.errors import RequestError
from whimbrel.inference.decode import checked_stops
from whimbrel.inference.detokenizer import StopStrings, TextStream
from whimbrel.inference.sampling import SampleRNG, SamplingParams
from whimbrel.inference.session import Session
from whimbrel.inference.speculative import Draft, speculate
from whimbrel.tokenization import ChatTemplate, Message, Tokenizer

__all__ = ["Answer", "Conversation"]


class Answer(NamedTuple):
    """An answer that begins."""

    pieces: Generator[str, None, None]
    """Its text as it comes; some pieces are empty. Close it to stop: what was said till then is remembered."""
    forgotten: int
    """How many of the oldest messages had to make room for it."""


class Conversation:
    """Messages to and from a model. What the next turn shares with the one before is not read again."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        sampling: SamplingParams,
        *,
        max_new_tokens: int = 256,
        system: str | None = None,
        stops: Sequence[str] = (),
        eos_id: int | Collection[int] | None = None,
        seed: int | None = None,
    ) -> None:
        self._session, self._tokenizer, self._template, self._sampling = session, tokenizer, template, sampling
        self._most, self._seed = max_new_tokens, seed
        self._stops, self._stop_ids = (*template.stops, *stops), checked_stops(eos_id) | {tokenizer.eot_id}
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens = {max_new_tokens} must be at least 1")
        StopStrings(self._stops), SampleRNG(seed)  # which refuse what no turn could be answered with
        self._check_opening()
        self._turns = 0
        self.messages: list[Message] = []
        """What was said and is not forgotten, the system's word left out."""

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = []

    def ask(self, text: str, draft: Draft | None = None) -> Answer:
        """Say something; a message that cannot be answered is refused, and is as if it had not been said."""
        said = [*self.messages, {"role": "user", "content": text}]
        first, ids = self._fitting(said)
        tokens = speculate(
            self._session,
            ids,
            self._sampling,
            draft,
            max_new_tokens=min(self._most, self._session.model.config.context_length - len(ids)),
            seed=None if self._seed is None else (self._seed + self._turns) % 2**63,  # after the last, the first
            eos_id=self._stop_ids,
        )
        answer = {"role": "assistant", "content": ""}  # from the start: it may be left before its first word
        self.messages = [*said[first:], answer]
        self._turns += 1
        return Answer(self._pieces(tokens, TextStream(self._tokenizer, ids, self._stops), answer), first)

    def _pieces(self, tokens: Iterator[int], words: TextStream, answer: dict[str, str]) -> Generator[str, None, None]:
        for token in itertools.chain(tokens, (None,)):
            piece = words.flush() if token is None else words.push(token)
            answer["content"] += piece
            yield piece
            if words.stopped:
                return

    def _check_opening(self) -> None:
        """Refuse a system's word that leaves no room for a message, or that the template does not take."""
        if self._opening:
            ids = self._template.encode(self._tokenizer, [*self._opening, {"role": "user", "content": "?"}])
            if len(ids) > self._room:
                raise self._too_long("the system's word, with the shortest message,", ids)

    @property
    def _room(self) -> int:
        """How many tokens the context has beside an answer."""
        context = self._session.model.config.context_length
        return context - min(self._most, context // 2)

    def _too_long(self, what: str, ids: list[int]) -> RequestError:
        context = self._session.model.config.context_length
        return RequestError(
            f"{what} comes to {len(ids)} tokens: beside an answer, the context of {context} has room for {self._room}"
        )

    def _fitting(self, said: list[Message]) -> tuple[int, list[int]]:
        """The first message that the model is shown, and the ids of what it is shown.

        Where not all fits beside an answer, no more than half the context is kept: so that the next turns, too, begin
        with what the cache holds.
        """
        half = self._session.model.config.context_length // 2
        asked = [place for place, message in enumerate(said) if message["role"] == "user"]
        for first in asked:
            ids = self._template.encode(self._tokenizer, [*self._opening, *said[first:]])
            if len(ids) <= (self._room if first in (0, asked[-1]) else half):
                return first, ids
        raise self._too_long("the message", ids)
