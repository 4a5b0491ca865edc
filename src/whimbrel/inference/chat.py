"""Multi-turn chat: a conversation that drops its oldest messages when the context is full."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import NamedTuple, TypeVar

from whimbrel.base.errors import RequestError
from whimbrel.inference.detokenizer import StopStrings, TextStream
from whimbrel.inference.llm import LLM
from whimbrel.inference.sampling import SampleRNG, SamplingParams
from whimbrel.inference.sequence import as_token_set
from whimbrel.inference.speculative import Draft
from whimbrel.tokenization import ChatTemplate, Message

__all__ = ["Answer", "Conversation", "PromptLimits", "fit_messages"]

P = TypeVar("P")


class PromptLimits(NamedTuple):
    """Maximum numbers of prompt tokens."""

    complete: int
    """Of a prompt from which nothing was dropped: leaves space for the answer, at most half of the context."""
    truncated: int
    """Of a prompt whose beginning was dropped: half of the context. The next prompts of the conversation then fit
    without dropping more, so they start with the same tokens, which are in the prefix cache."""
    last_message: int
    """Of a conversation of which only the last message of the user is left."""

    @classmethod
    def of(cls, context_length: int, max_new_tokens: int) -> PromptLimits:
        """The limits of a model with this context length."""
        half = context_length // 2
        complete = context_length - min(max_new_tokens, half)
        return cls(complete, half, complete)


def fit_messages(
    messages: Sequence[Message], encode: Callable[[Sequence[Message], int], P | None], limits: PromptLimits
) -> tuple[int, P | None]:
    """Drop the oldest messages of a conversation if it does not fit.

    `encode(messages, max_tokens)` returns the prompt, or None if it has more tokens. System messages at the start are
    kept; if any are dropped, the messages after them start with a user message. Returns the number of messages dropped
    and the prompt, which is None if even the last user message does not fit.
    """
    num_system = sum(1 for _ in itertools.takewhile(lambda message: message["role"] == "system", messages))
    system, turns = messages[:num_system], messages[num_system:]
    if (prompt := encode(messages, limits.complete)) is not None:
        return 0, prompt
    starts = [index for index, message in enumerate(turns) if message["role"] == "user" and index > 0]
    if not starts:
        return 0, encode(messages, limits.last_message)
    prompts: dict[int, P | None] = {}  # a binary search, since each takes time to render and encode

    def fits(start: int) -> bool:
        limit = limits.last_message if start == starts[-1] else limits.truncated
        prompts[start] = encode([*system, *turns[start:]], limit)
        return prompts[start] is not None

    first = starts[min(bisect.bisect_left(starts, 1, key=fits), len(starts) - 1)]
    return first, prompts[first]


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
            if len(ids) > self._limits.complete:
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
        first, ids = fit_messages([*self._system, *messages], self._encode, self._limits)
        if ids is None:
            ids = self._template.encode(self._tokenizer, [*self._system, messages[-1]])
            raise self._too_long_error("the message", ids)
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
    def _limits(self) -> PromptLimits:
        return PromptLimits.of(self._context_length, self._max_new_tokens)

    def _encode(self, messages: Sequence[Message], max_tokens: int) -> list[int] | None:
        ids = self._template.encode(self._tokenizer, messages, max_tokens=max_tokens)
        return ids if len(ids) <= max_tokens else None

    def _too_long_error(self, name: str, ids: list[int]) -> RequestError:
        return RequestError(
            f"{name}: expected at most {self._limits.complete} tokens (leaving space for an answer, context length "
            f"{self._context_length}), got {len(ids)}"
        )
