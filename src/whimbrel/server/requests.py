"""What a client may ask: the bodies of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from whimbrel.server.fields import (
    MAX_LOGPROBS,
    MAX_N,
    WHOLE,
    LogitBias,
    Prompts,
    Stops,
    Strict,
    TextContent,
    leave_out_neutral,
    refuse,
)

__all__ = ["ChatRequest", "CompletionRequest", "Drawing", "Message"]

NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",)}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
NEUTRAL_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""Fields of OpenAI's that cannot be honoured here, each with the values that ask for nothing."""


class StreamOptions(Strict):
    """How a stream is sent."""

    include_usage: bool = False
    """Whether a last event, before [DONE], counts the tokens."""
    include_obfuscation: Literal[False] = False
    """Events are not padded."""


def _needs(field: str, kind: str, other: str) -> dict[str, Any]:
    """For the document: where `field` is given (its values are of this kind), `other` must be true."""
    given = {"properties": {field: {"type": kind}}, "required": [field]}
    return {"if": given, "then": {"properties": {other: {"const": True}}, "required": [other]}}


STREAM_OPTIONS_NEED_STREAM = _needs("stream_options", "object", "stream")


class Drawing(Strict):
    """What both routes take: the model, how tokens are drawn, when to stop, how to answer."""

    model: str
    """The id that /v1/models lists."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 takes the likeliest token. (default: the model's own, or 1)"""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Draw from the fewest likeliest tokens of this total probability."""
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = None
    """Sample from the k most likely tokens; 0 turns it off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Draw from tokens that have at least this part of the likeliest one's probability."""
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    """Divides the logits of tokens in the prompt or drawn before; 1 is none."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Taken from the logits of tokens drawn before."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Taken from the logits of tokens drawn before, as often as they were."""
    logit_bias: LogitBias | None = None
    """Added to the logits of these token ids."""
    n: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None
    """How many texts follow each prompt."""
    stop: Stops | None = None
    """Strings that end a text; they are no part of it."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1), WHOLE] | None = None
    """The same seed draws the same text."""
    stream: bool | None = None
    """Whether text is sent as it is drawn, as server-sent events."""
    stream_options: StreamOptions | None = None
    """How it is streamed."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """A name for the log."""

    @model_validator(mode="after")
    def _options_belong_to_a_stream(self) -> Drawing:
        if self.stream_options is not None and not self.stream:
            refuse("invalid_value", "stream_options", "stream_options is for stream = true: leave it out")
        return self


class CompletionRequest(Drawing):
    """A text to go on from, or several."""

    model_config = ConfigDict(json_schema_extra={"allOf": [STREAM_OPTIONS_NEED_STREAM]})

    prompt: Prompts
    """A text, texts, token ids, or lists of token ids; an empty text begins a new document."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = None
    """Tokens to write at most; 16 when not given. 0 only reads the prompt, to echo it with its scores."""
    parse_special: bool | None = None
    """Whether to parse special tokens such as <|im_start|> in a text prompt (default) or treat them as plain text.
    Token ids are used as given, and special tokens in chat messages are never parsed."""
    echo: bool | None = None
    """Whether the prompt stands before the text."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    """Give the log-probability of each token, and this many of the likeliest beside it."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        return leave_out_neutral(given, cls.model_fields, NEUTRAL_COMPLETION)


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: TextContent

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        return leave_out_neutral(given, cls.model_fields, NEUTRAL_MESSAGE)


TWO_LENGTHS: dict[str, Any] = {
    "properties": {name: {"type": "integer"} for name in ("max_tokens", "max_completion_tokens")},
    "required": ["max_tokens", "max_completion_tokens"],
}


class ChatRequest(Drawing):
    """A conversation to go on with."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [STREAM_OPTIONS_NEED_STREAM, _needs("top_logprobs", "integer", "logprobs"), {"not": TWO_LENGTHS}]
        }
    )

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    """The turns so far."""
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    """Tokens to write at most; all that the context leaves when not given."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    """The newer name of max_tokens: give one of them."""
    logprobs: bool | None = None
    """Whether to give the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    """How many of the likeliest tokens to give beside each; needs logprobs."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        return leave_out_neutral(given, cls.model_fields, NEUTRAL_CHAT)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            refuse("invalid_value", "top_logprobs", "top_logprobs needs logprobs = true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            refuse("invalid_value", "max_tokens", "max_tokens and max_completion_tokens are one thing: give one")
        return self

    @property
    def length(self) -> int | None:
        """Tokens to write at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
