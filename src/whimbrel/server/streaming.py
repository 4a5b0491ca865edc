"""From engine events to responses: the text and log-probabilities of each choice, as one JSON body or as a stream.

`Choice` converts the events of one sample to `Delta`s, `CompletionFormat` and `ChatFormat` convert those to JSON, and
`ResponseBuilder` collects the choices of a request.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fastapi import Response
from fastapi.responses import StreamingResponse

from whimbrel.inference import Event, Logprob, TextStream
from whimbrel.inference.detokenizer import Detokenizer
from whimbrel.server.errors import ApiError, json_response
from whimbrel.server.schema import GenerationRequest
from whimbrel.server.served_model import Prompt, ServedModel, TokenTexts
from whimbrel.server.tool_calls import ToolCall, ToolCallParser
from whimbrel.server.worker import Job, non_finite_logits_error
from whimbrel.tokenization import Tokenizer

__all__ = [
    "ChatFormat",
    "Choice",
    "CompletionFormat",
    "Delta",
    "PromptContext",
    "ResponseBuilder",
    "ResponseFormat",
    "ScoredToken",
]

MIN_LOGPROB = -9999.0
"""Replaces the log-probability -inf, which JSON cannot express."""


class ScoredToken(NamedTuple):
    """A token with its log-probabilities and the offset of its text."""

    token: int
    score: Logprob
    offset: int


@dataclass(slots=True)
class Delta:
    """The next part of a choice that can be sent to the client."""

    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish or self.tool_calls)

    def extend(self, other: Delta) -> None:
        """Append the next delta of the same choice."""
        self.text += other.text
        self.tokens += other.tokens
        self.finish = other.finish or self.finish
        self.tool_calls += other.tool_calls


@dataclass(slots=True)
class PromptContext:
    """State shared by all choices of one prompt."""

    prompt: Prompt
    stops: Sequence[str]
    """Strings that end a choice."""
    echo: bool
    """Whether choices start with the prompt."""
    scores: Sequence[Logprob] = ()
    """Log-probabilities of the prompt's tokens, if requested."""
    tool_parser: Callable[[], ToolCallParser] | None = None
    """Creates the parser of a choice that may call tools."""

    def echo_delta(self, tokenizer: Tokenizer) -> Delta:
        """The prompt as the beginning of a choice; empty without `echo`."""
        if not self.echo:
            return Delta()
        offsets = self.prompt.offsets
        if offsets is None:
            offsets = _decoded_offsets(tokenizer, self.prompt.ids[: len(self.scores)])
        tokens = [ScoredToken(*entry) for entry in zip(self.prompt.ids, self.scores, offsets, strict=False)]
        return Delta(self.prompt.text, tokens)


def _decoded_offsets(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, ...]:
    """The offset of each token in the decoded text, with special tokens included."""
    detokenizer, offsets = Detokenizer(tokenizer, keep_special=True), []
    for token in ids:
        detokenizer.push(token)
        offsets.append(detokenizer.span[0])
    return tuple(offsets)


class Choice:
    """The text of one sample."""

    def __init__(self, index: int, context: PromptContext, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self.index, self.context = index, context
        self.finish: str | None = None
        self.num_tokens = 0
        """Number of generated tokens."""
        self._tokenizer, self._started = tokenizer, False
        self._parser = context.tool_parser() if context.tool_parser else None
        kept = self._parser.special_tokens if self._parser else ()
        self._stream = TextStream(tokenizer, context.prompt.ids, context.stops, kept_tokens=kept)
        self._called_tools = False
        self._sent = 0
        # Tokens wait here until their text is sent: what may be the beginning of a stop string, or an incomplete UTF-8
        # sequence, is held back. Each entry has the number of characters that must have been sent before it.
        self._pending: deque[tuple[int, ScoredToken]] | None = deque() if with_logprobs else None

    def add(self, event: Event) -> Delta:
        """Process an event; returns what can be sent now (nothing after a stop string has ended the choice)."""
        if self.finish is not None:
            return Delta()
        delta = Delta()
        if not self._started and (event.token is not None or event.finish_reason is not None):
            self._started = True
            delta = self.context.echo_delta(self._tokenizer)
        text = ""
        if event.token is not None:
            self.num_tokens += 1
            text = self._stream.push(event.token)
            self._add_pending(event)
        if self._stream.stopped:
            self.finish = "stop"
        elif event.finish_reason is not None:
            self.finish = event.finish_reason
            text += self._stream.flush()
        self._sent += len(text)
        tokens = self._pop_sent()
        calls: list[ToolCall] = []
        if self._parser is not None:
            text, calls = self._parse_calls(self._parser, text)
        delta.extend(Delta(text, tokens, self.finish, calls))
        return delta

    def _parse_calls(self, parser: ToolCallParser, text: str) -> tuple[str, list[ToolCall]]:
        """Separate tool calls from the text, and set the finish reason of a choice that ends with them."""
        text, calls = parser.push(text)
        if self.finish is not None:
            rest = parser.flush()
            text, calls = text + rest.content, [*calls, *rest.calls]
        self._called_tools |= bool(calls)
        if self.finish == "stop" and self._called_tools:
            self.finish = "tool_calls"
        return text, [*calls]

    def _add_pending(self, event: Event) -> None:
        """Queue a token until the first character of its text is sent, or, if it has no text, all text before it."""
        if self._pending is None or event.token is None:
            return
        start, end = self._stream.span
        token = ScoredToken(event.token, Logprob(event.logprob, event.top), len(self.context.prompt.text) + start)
        self._pending.append((min(start + 1, end), token))

    def _pop_sent(self) -> list[ScoredToken]:
        """Tokens whose text has been sent; all tokens at the end, unless a stop string cut the rest off."""
        complete = self.finish is not None and not self._stream.stopped
        tokens = []
        while self._pending and (complete or self._pending[0][0] <= self._sent):
            tokens.append(self._pending.popleft()[1])
        return tokens


class ResponseFormat(Protocol):
    """How a route writes its choices as JSON."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    with_logprobs: bool

    def truncation(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """The field that says what was dropped from the prompts."""
        ...

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """A complete choice."""
        ...

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """A piece of a choice in a stream."""
        ...

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """The chunk sent before the first text of a choice; None if there is none."""
        ...


class CompletionFormat:
    """The JSON format of /v1/completions."""

    id_prefix = "cmpl-"
    object_name = chunk_object_name = "text_completion"

    def __init__(self, texts: TokenTexts, *, with_logprobs: bool) -> None:
        self._texts, self.with_logprobs = texts, with_logprobs

    def truncation(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        return {"truncated": any(prompt.dropped for prompt in prompts)}

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs(delta.tokens) if self.with_logprobs else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}

    chunk = choice

    def first_chunk(self, index: int) -> None:
        """Nothing: a stream starts with text."""

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        return {
            "tokens": [self._texts.to_text(entry.token) for entry in tokens],
            "token_logprobs": [_clamp_logprob(entry.score.logprob) for entry in tokens],
            "top_logprobs": [self._top(entry.token, entry.score) for entry in tokens],
            "text_offset": [entry.offset for entry in tokens],
        }

    def _top(self, token: int, score: Logprob) -> dict[str, float | None] | None:
        """The most likely tokens and the token itself by text; of two with the same text, the more likely."""
        if score.logprob is None:
            return None
        top: dict[str, float | None] = {}
        for other, logprob in (*score.top, (token, score.logprob)):
            top.setdefault(self._texts.to_text(other), _clamp_logprob(logprob))
        return top


class ChatFormat:
    """The JSON format of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name, chunk_object_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, *, with_logprobs: bool) -> None:
        self._texts, self.with_logprobs = texts, with_logprobs

    def truncation(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        return {"dropped_messages": sum(prompt.dropped for prompt in prompts)}

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.tool_calls:
            message |= {"content": delta.text or None, "tool_calls": [_tool_call(call) for call in delta.tool_calls]}
        logprobs = self._logprobs(delta.tokens)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": delta.finish}

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        content: dict[str, Any] = {"content": delta.text} if delta.text or delta.tokens else {}
        if delta.tool_calls:
            content["tool_calls"] = [{"index": call.index} | _tool_call(call) for call in delta.tool_calls]
        logprobs = self._logprobs(delta.tokens)
        return {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": delta.finish}

    def first_chunk(self, index: int) -> dict[str, Any]:
        content = {"role": "assistant", "content": ""}
        return {"index": index, "delta": content, "logprobs": None, "finish_reason": None}

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        content = [
            self._token(entry.token, entry.score.logprob)
            | {"top_logprobs": [self._token(*other) for other in entry.score.top]}
            for entry in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._texts.to_text(token),
            "bytes": list(self._texts.to_bytes(token)),
            "logprob": _clamp_logprob(logprob),
        }


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _clamp_logprob(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)


class ResponseBuilder:
    """Builds the response of one request from the events of its job."""

    def __init__(
        self,
        model: ServedModel,
        request: GenerationRequest,
        contexts: Sequence[PromptContext],
        job: Job,
        response_format: ResponseFormat,
    ) -> None:
        """`contexts` has one entry per prompt, in the order of the job's requests."""
        self._job, self._format, self._contexts = job, response_format, contexts
        n = request.n or 1
        with_logprobs = response_format.with_logprobs
        self._choices = [
            [Choice(index * n + sample, context, model.tokenizer, with_logprobs=with_logprobs) for sample in range(n)]
            for index, context in enumerate(contexts)
        ]
        self._include_usage = request.stream_options is not None and request.stream_options.include_usage
        self._head = {
            "id": f"{response_format.id_prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }
        if request.truncation == "auto":
            self._head |= response_format.truncation([context.prompt for context in contexts])

    async def complete(self) -> Response:
        """One JSON body, once all choices have finished."""
        results = {choice.index: Delta() for choices in self._choices for choice in choices}
        async for choice, delta in self._deltas():
            results[choice.index].extend(delta)
        choices = [self._format.choice(index, delta) for index, delta in results.items()]
        head = {**self._head, "object": self._format.object_name}
        return json_response({**head, "choices": choices, "usage": self.usage()})

    def stream(self) -> Response:
        """Server-sent events."""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(), headers=headers, media_type="text/event-stream")

    def usage(self) -> dict[str, int]:
        """Token counts of the prompts and of the completions so far."""
        prompt = sum(len(context.prompt.ids) for context in self._contexts)
        completion = sum(choice.num_tokens for choices in self._choices for choice in choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    async def _events(self) -> AsyncIterator[str]:
        head = {**self._head, "object": self._format.chunk_object_name}
        if self._include_usage:
            head["usage"] = None
        try:
            for choices in self._choices:
                for choice in choices:
                    if (first := self._format.first_chunk(choice.index)) is not None:
                        yield _event({**head, "choices": [first]})
            async for choice, delta in self._deltas():
                yield _event({**head, "choices": [self._format.chunk(choice.index, delta)]})
            if self._include_usage:
                yield _event({**head, "choices": [], "usage": self.usage()})
            yield "data: [DONE]\n\n"
        except ApiError as error:  # the status line has been sent already
            yield _event(error.body)

    async def _deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """The deltas of all choices until all have finished; events of a choice that arrive together are merged."""
        unfinished = sum(len(choices) for choices in self._choices)
        async for events in self._job:
            deltas: dict[Choice, Delta] = {}
            for index, event in events:
                if event.prompt is not None:
                    self._contexts[index].scores = event.prompt
                choice = self._choices[index][event.sample]
                if event.finish_reason == "error" and choice.finish is None:
                    raise non_finite_logits_error()
                delta = choice.add(event)
                deltas.setdefault(choice, Delta()).extend(delta)
                if delta.finish is not None:
                    unfinished -= 1
                    if event.finish_reason is None:  # finished by a stop string, which the engine does not know about
                        self._job.cancel(index, event.sample)
            for choice, delta in deltas.items():
                if delta:
                    yield choice, delta
            if not unfinished:
                return


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
