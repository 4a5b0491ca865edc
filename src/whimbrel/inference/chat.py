"""Multi-turn chat: a conversation that drops its oldest messages when the context is full."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from typing import NamedTuple

from whimbrel.base.errors import RequestError
from whimbrel.inference.detokenizer import StopStrings, TextStream
from whimbrel.inference.llm import LLM
from whimbrel.inference.sampling import SampleRNG, SamplingParams
from whimbrel.inference.sequence import as_token_set
from whimbrel.inference.speculative import Draft
from whimbrel.tokenization import ChatTemplate, Message

__all__ = ["Answer", "Conversation"]


class Answer(NamedTuple):
    """An answer that is being generated."""

    pieces: Generator[str, None, None]
    """Text as it is generated; some pieces are empty. Close it to stop; the answer so far stays in `messages`."""
    num_dropped: int
    """Number of old messages dropped to fit the context."""


class Conversation:
    """Messages to and from a model. The engine's prefix cache keeps earlier turns from being prefilled again."""

    def __init__(
        self,
        llm: LLM,
        template: ChatTemplate | None = None,
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int = 256,
        system: str | None = None,
        stop: Sequence[str] = (),
        stop_ids: int | Collection[int] | None = None,
        seed: int | None = None,
    ) -> None:
        if llm.tokenizer is None:
            raise RequestError("expected a tokenizer to chat, got none: pass tokenizer to LLM")
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
        self._llm, self._tokenizer, self._template = llm, llm.tokenizer, template or llm.template
        self._sampling, self._max_new_tokens, self._seed = sampling, max_new_tokens, seed
        self._stop = (*self._template.stop_strings, *stop)
        self._stop_ids = as_token_set(stop_ids) | {llm.tokenizer.eot_id}
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        # Raise on invalid arguments before the first turn.
        StopStrings(self._stop)
        SampleRNG(seed)
        if self._system:
            ids = self._template.encode(self._tokenizer, [*self._system, {"role": "user", "content": "?"}])
            if len(ids) > self._max_prompt:
                raise self._too_long_error("the system prompt with a message of one character", ids)
        self._num_turns = 0
        self.messages: list[Message] = []
        """The messages that were not dropped, without the system prompt."""

    def reset(self) -> None:
        """Forget all messages."""
        self.messages = []

    def ask(self, text: str, draft: Draft | None = None) -> Answer:
        """Send a message. Raises RequestError if it does not fit into the context; `messages` is then unchanged."""
        messages = [*self.messages, {"role": "user", "content": text}]
        first, ids = self._fit(messages)
        tokens = self._llm.stream_tokens(
            ids,
            self._sampling,
            max_new_tokens=min(self._max_new_tokens, self._context_length - len(ids)),
            seed=None if self._seed is None else (self._seed + self._num_turns) % 2**63,
            stop_ids=self._stop_ids,
            draft=draft,
        )
        # Added before the first token, so that roles alternate even if generation is stopped immediately.
        answer = {"role": "assistant", "content": ""}
        self.messages = [*messages[first:], answer]
        self._num_turns += 1
        return Answer(self._pieces(tokens, TextStream(self._tokenizer, ids, self._stop), answer), first)

    def _pieces(self, tokens: Iterator[int], text: TextStream, answer: dict[str, str]) -> Generator[str, None, None]:
        for token in tokens:
            piece = text.push(token)
            answer["content"] += piece
            yield piece
            if text.stopped:
                return
        piece = text.flush()
        answer["content"] += piece
        yield piece

    @property
    def _context_length(self) -> int:
        return self._llm.engine.context_length

    @property
    def _max_prompt(self) -> int:
        """Maximum number of prompt tokens that leaves space for an answer."""
        return self._context_length - min(self._max_new_tokens, self._context_length // 2)

    def _too_long_error(self, name: str, ids: list[int]) -> RequestError:
        return RequestError(
            f"{name}: expected at most {self._max_prompt} tokens (leaving space for an answer, context length "
            f"{self._context_length}), got {len(ids)}"
        )

    def _fit(self, messages: list[Message]) -> tuple[int, list[int]]:
        """The index of the first message that is kept, and the token ids of the prompt.

        If not everything fits, only half of the context is filled: the next turns then start with the same tokens,
        which are in the prefix cache.
        """
        half = self._context_length // 2
        user_turns = [index for index, message in enumerate(messages) if message["role"] == "user"]
        for first in user_turns:
            ids = self._template.encode(self._tokenizer, [*self._system, *messages[first:]])
            if len(ids) <= (self._max_prompt if first in (0, user_turns[-1]) else half):
                return first, ids
        raise self._too_long_error("the message", ids)
