"""Request and response bodies of the API, with OpenAI's field names (and vLLM's for additional sampling options).

Validation is strict: unknown fields, wrong types and unsupported options are rejected, and the error names the field.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from whimbrel.config import did_you_mean

__all__ = [
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "CompletionRequest",
    "CompletionResponse",
    "GenerationRequest",
    "Message",
    "ModelCard",
    "ModelList",
]

MAX_N, MAX_STOPS, MAX_STOP_LENGTH, MAX_LOGPROBS, MAX_BIASES, MAX_TOOLS = 64, 16, 256, 20, 1024, 128

# Fields of OpenAI's API that are not supported, each with the values that are accepted because they have no effect.
UNSUPPORTED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",)}
UNSUPPORTED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": (),
    "web_search_options": (),
}
UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}


def raise_invalid(param: str, message: str, *, code: str = "invalid_value") -> NoReturn:
    """Raise a validation error for the field `param`."""
    raise PydanticCustomError(code, "{message}", {"param": param, "message": message})


def _drop_no_effect_fields(body: Any, known: Collection[str], unsupported: Mapping[str, Collection[Any]]) -> Any:
    """Drop nulls and unsupported fields whose value has no effect; reject other unsupported and unknown fields."""
    if not isinstance(body, dict):
        return body
    result = {}
    for name, value in body.items():
        if value is None and (name in known or name in unsupported):
            continue
        if name in unsupported:
            # Compares types as well: to Python, 0 equals False.
            if not any(type(value) is type(accepted) and value == accepted for accepted in unsupported[name]):
                raise_invalid(name, f"{name} is not supported: remove it", code="unsupported_parameter")
        elif name not in known:
            # pydantic errors cannot contain a lone surrogate.
            short = name[:64].encode("utf-8", "backslashreplace").decode()
            raise_invalid(short, f"unknown field {short!r}{did_you_mean(short, known)}", code="unknown_parameter")
        else:
            result[name] = value
    return result


# Validators of single fields. Each stops at the first error: pydantic's own would collect an error per item of a list,
# and a list may have a million items.


def _integer(value: Any) -> Any:
    """In JSON, 1.0 is an integer."""
    return int(value) if type(value) is float and value.is_integer() else value


def _validate_prompt(value: Any) -> list[str | list[int]]:
    """Normalize to a list of prompts, each a string or a list of token ids."""
    expected = "expected prompt to be a string, a list of strings, a list of token ids or a list of token id lists"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise_invalid("prompt", f"{expected}, got {type(value).__name__ if value != [] else 'an empty list'}")
    if all(isinstance(item, str) for item in value):
        return value
    lists = value if all(isinstance(item, list) and item for item in value) else [value]
    # Compares the set of types in each list: a Python loop over a million tokens would block the event loop.
    types = [set(map(type, item)) for item in lists]
    if all(item_types == {int} for item_types in types):
        return list(lists)
    if all(item_types <= {int, float} for item_types in types):
        ids = [[_integer(token) for token in item] for item in lists]
        if all(set(map(type, item)) == {int} for item in ids):
            return list(ids)
    raise_invalid("prompt", f"{expected}, got an empty or mixed list")


def _validate_stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise_invalid("stop", f"expected stop to be a string or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise_invalid("stop", f"expected each stop to be a string of 1 to {MAX_STOP_LENGTH} characters")
    try:
        "".join(stops).encode()
    except UnicodeEncodeError:
        raise_invalid("stop", "expected stop to be valid Unicode, got a lone surrogate")
    return stops


def _validate_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise_invalid("logit_bias", f"expected logit_bias to be an object of at most {MAX_BIASES} token ids")
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 9):
            raise_invalid("logit_bias", f"expected token ids as keys of logit_bias, got {token[:64]!r}")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise_invalid("logit_bias", f"expected a logit_bias from -100 to 100 for token {token}")
    return {int(token): float(bias) for token, bias in value.items()}


def _validate_tools(value: Any) -> list[dict[str, Any]]:
    """Check the fields that the server uses; the objects stay as they are, since the chat template renders them."""
    expected = "expected tools like {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise_invalid("tools", f"expected tools to be a list of at most {MAX_TOOLS} functions")
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise_invalid("tools", expected)
        for name, kind in (("description", str), ("parameters", dict), ("strict", bool)):
            if not isinstance(function.get(name), kind | None):
                raise_invalid("tools", f"{expected}, got {name} of type {type(function[name]).__name__}")
        if function.get("strict"):
            raise_invalid("tools", "strict is not supported: remove it", code="unsupported_parameter")
    return value


def _validate_tool_choice(value: Any) -> Any:
    if value not in ("auto", "none"):
        raise_invalid("tool_choice", "expected tool_choice to be 'auto' or 'none': forcing a call is not supported")
    return value


def _validate_arguments(value: Any) -> Any:
    """The arguments of a call as an object, which templates expect; OpenAI's API has them as a JSON string."""
    try:
        arguments = json.loads(value or "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(value, str) or not isinstance(arguments, dict):
        raise_invalid("messages", "expected the arguments of a tool call to be a JSON object, encoded as a string")
    return arguments


def _join_content(value: Any) -> Any:
    """The text of a message; text parts are joined."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise_invalid("messages", "expected content parts like {'type': 'text', 'text': ...}")
        texts.append(part["text"])
    return "".join(texts)


class StrictModel(BaseModel):
    """A JSON object with known fields whose values are not converted to other types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class TextPart(StrictModel):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class Function(BaseModel):
    """A function that the model can call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: Literal[False] | None = None
    """Strict mode needs constrained decoding, which is not supported."""


class Tool(BaseModel):
    """A tool, rendered by the chat template with all of its fields."""

    type: Literal["function"]
    function: Function


class FunctionCall(StrictModel):
    """Name and arguments of a call."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_validate_arguments, json_schema_input_type=str)]
    """A JSON object, encoded as a string."""


class MessageToolCall(StrictModel):
    """A call that the assistant made."""

    id: str
    type: Literal["function"]
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it."""
        return {"id": self.id, "type": self.type, "function": dict(self.function)}


INTEGER = BeforeValidator(_integer)

# Types for the OpenAPI document.
_TokenId = Annotated[int, Field(ge=0)]
_TokenIds = Annotated[list[_TokenId], Field(min_length=1)]
_TokenIdLists = Annotated[list[_TokenIds], Field(min_length=1)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Biases = Annotated[
    dict[_BiasKey, _Bias], Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False})
]

Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(
        _validate_prompt,
        json_schema_input_type=str | Annotated[list[str], Field(min_length=1)] | _TokenIds | _TokenIdLists,
    ),
]
Stops = Annotated[
    list[str],
    PlainValidator(_validate_stop, json_schema_input_type=_Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)]),
]
LogitBias = Annotated[dict[int, float], PlainValidator(_validate_logit_bias, json_schema_input_type=_Biases)]
Tools = Annotated[
    list[dict[str, Any]],
    PlainValidator(_validate_tools, json_schema_input_type=Annotated[list[Tool], Field(max_length=MAX_TOOLS)]),
]
ToolChoice = Annotated[Literal["auto", "none"], BeforeValidator(_validate_tool_choice)]
TextContent = Annotated[str, BeforeValidator(_join_content, json_schema_input_type=str | list[TextPart])]


def _requires(field: str, field_type: str, other: str) -> dict[str, Any]:
    """JSON schema: if `field` is set, `other` must be true."""
    field_is_set = {"properties": {field: {"type": field_type}}, "required": [field]}
    return {"if": field_is_set, "then": {"properties": {other: {"const": True}}, "required": [other]}}


STREAM_OPTIONS_REQUIRE_STREAM = _requires("stream_options", "object", "stream")
BOTH_MAX_TOKENS: dict[str, Any] = {
    "properties": {name: {"type": "integer"} for name in ("max_tokens", "max_completion_tokens")},
    "required": ["max_tokens", "max_completion_tokens"],
}


def _only_with_role(field: str, field_type: dict[str, Any], role: str) -> dict[str, Any]:
    """JSON schema: `field` may only be set in messages with this role."""
    field_is_set = {"properties": {field: field_type}, "required": [field]}
    return {"if": field_is_set, "then": {"properties": {"role": {"const": role}}}}


_NON_EMPTY_STRING, _NON_EMPTY_LIST = {"type": "string", "minLength": 1}, {"type": "array", "minItems": 1}
_HAS_CONTENT = {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]}
_HAS_TOOL_CALLS = {"properties": {"tool_calls": _NON_EMPTY_LIST}, "required": ["tool_calls"]}
MESSAGE_FIELDS_BY_ROLE: list[Any] = [
    _only_with_role("tool_calls", _NON_EMPTY_LIST, "assistant"),
    _only_with_role("tool_call_id", _NON_EMPTY_STRING, "tool"),
    _only_with_role("name", _NON_EMPTY_STRING, "tool"),
    {"anyOf": [_HAS_CONTENT, _HAS_TOOL_CALLS]},
    {
        "if": {"properties": {"role": {"const": "tool"}}},
        "then": {"properties": {"tool_call_id": {"type": "string"}}, "required": ["tool_call_id"]},
    },
]


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool = False
    """Send the token counts in a final event before [DONE]."""
    include_obfuscation: Literal[False] = False
    """Obfuscation (padding of events) is not supported."""


class GenerationRequest(StrictModel):
    """Fields of both completion routes: model, sampling parameters, stop conditions, streaming."""

    model: str
    """Model id, as listed by /v1/models."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Sampling temperature; 0 is greedy decoding. (default: the model's generation_config.json, or 1)"""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the smallest set of tokens with this total probability."""
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), INTEGER] | None = None
    """Sample from the k most likely tokens; 0 turns it off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from tokens with at least this fraction of the highest probability."""
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    """Divides positive (multiplies negative) logits of tokens in the prompt or the completion; 1 turns it off."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logits of tokens already in the completion."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logits of tokens once for each time they occur in the completion."""
    logit_bias: LogitBias | None = None
    """Added to the logits of these token ids."""
    n: Annotated[int, Field(ge=1, le=MAX_N), INTEGER] | None = None
    """Number of completions per prompt. (default: 1)"""
    truncation: Literal["auto", "disabled"] | None = None
    """With "auto", the beginning of a prompt that is too long for the context and max_tokens is dropped: the oldest
    messages of a conversation, or the beginning of a text. (default: "disabled", a long prompt is rejected)"""
    stop: Stops | None = None
    """Strings that end a completion; not included in it."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1), INTEGER] | None = None
    """Seed for reproducible sampling."""
    stream: bool | None = None
    """Send text as it is generated, as server-sent events."""
    stream_options: StreamOptions | None = None
    """Options of the stream."""
    user: Annotated[str, Field(max_length=256)] | None = None
    """End-user identifier, written to the access log."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise_invalid("stream_options", "stream_options requires stream = true")
        return self


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra={"allOf": [STREAM_OPTIONS_REQUIRE_STREAM]})

    prompt: Prompts
    """A string, a list of strings, a list of token ids, or a list of such lists; an empty string
    starts a new document."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), INTEGER] | None = None
    """Maximum number of new tokens (default: 16). With 0, the prompt is only scored, for echo with logprobs."""
    parse_special: bool | None = None
    """Whether to parse special tokens such as <|im_start|> in a text prompt (default) or treat them as plain text.
    Token ids are used as given, and special tokens in chat messages are never parsed."""
    echo: bool | None = None
    """Return the prompt in front of the completion."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), INTEGER] | None = None
    """Return the log-probability of each token, and of this many of the most likely tokens."""

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, body: Any) -> Any:
        return _drop_no_effect_fields(body, cls.model_fields, UNSUPPORTED_IN_COMPLETIONS)


class Message(StrictModel):
    """One message of a conversation."""

    model_config = ConfigDict(json_schema_extra={"allOf": MESSAGE_FIELDS_BY_ROLE})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextContent | None = None
    """Text, or a list of text parts; null only in a message with tool_calls."""
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Calls that the assistant made."""
    tool_call_id: str | None = None
    """In a message with role tool: the id of the call that this is the result of."""
    name: str | None = None
    """In a message with role tool: the function that was called, for chat templates that use it."""

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, body: Any) -> Any:
        return _drop_no_effect_fields(body, cls.model_fields, UNSUPPORTED_IN_MESSAGES)

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool"), ("name", "tool")):
            if getattr(self, name) and self.role != role:
                raise_invalid("messages", f"{name} is only supported in messages of role {role}")
        if self.content is None and not self.tool_calls:
            raise_invalid("messages", f"expected content in a message of role {self.role}, got none")
        if self.role == "tool" and self.tool_call_id is None:
            raise_invalid("messages", "expected tool_call_id in a message of role tool, got none")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message with the fields and roles that chat templates know."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = self.content or ""
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message | {name: value for name in ("tool_call_id", "name") if (value := getattr(self, name))}


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                STREAM_OPTIONS_REQUIRE_STREAM,
                _requires("top_logprobs", "integer", "logprobs"),
                {"not": BOTH_MAX_TOKENS},
            ]
        }
    )

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    """The conversation so far."""
    tools: Tools | None = None
    """Functions that the model can call, rendered by its chat template."""
    tool_choice: ToolChoice | None = None
    """With "none", the tools are omitted; with "auto" (default), the model decides whether to call one."""
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), INTEGER] | None = None
    """Maximum number of new tokens. (default: the rest of the context)"""
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), INTEGER] | None = None
    """OpenAI's newer name for max_tokens."""
    logprobs: bool | None = None
    """Return the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), INTEGER] | None = None
    """Number of most likely tokens to return for each token; requires logprobs."""

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, body: Any) -> Any:
        return _drop_no_effect_fields(body, cls.model_fields, UNSUPPORTED_IN_CHAT)

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise_invalid("top_logprobs", "top_logprobs requires logprobs = true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise_invalid("max_tokens", "max_tokens and max_completion_tokens are the same: set one of them")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """`max_completion_tokens` or `max_tokens`, whichever is given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


# Responses. These models document the bodies in /openapi.json; `streaming` writes them.

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ModelCard(BaseModel):
    """A served model, or an adapter."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None
    """The base model of an adapter."""
    context_length: int
    """Maximum number of tokens, prompt included."""
    num_parameters: int
    """Number of parameters; for an adapter, that of its base model."""
    dtype: str
    """Data type of the weights, or the format they are quantized to."""
    vocab_size: int
    has_chat_template: bool
    """False for base models: they continue text."""
    supports_tools: bool
    """Whether the chat template renders tools and the server parses its tool calls."""
    generation_config: dict[str, float]
    """Defaults in generation_config.json: sampling parameters and max_new_tokens."""


class ModelList(BaseModel):
    """The model and its adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Logprobs(BaseModel):
    """The tokens of a completion; each list has one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason


class CompletionResponse(BaseModel):
    """Response of POST /v1/completions: all completions of the first prompt, then those of the second, ..."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    truncated: bool = False
    """Whether the beginning of a prompt was dropped; only sent with truncation = "auto"."""
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    """One of the most likely tokens."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    """A generated token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of a chat completion."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(BaseModel):
    """Name of a function, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call in the assistant's message."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The assistant's message; content is null if it only has tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class ChatCompletionChoice(BaseModel):
    """One chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletionResponse(BaseModel):
    """Response of POST /v1/chat/completions."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    dropped_messages: int = 0
    """Number of old messages that were dropped; only sent with truncation = "auto"."""
    choices: list[ChatCompletionChoice]
    usage: Usage
