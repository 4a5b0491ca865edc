"""Answers in OpenAI's two shapes, whole and in pieces; the models document them, the shapes write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from whimbrel.inference import Logprob
from whimbrel.server.choice import Piece, Scored
from whimbrel.server.tokens import TokenTexts

__all__ = ["ChatAnswer", "ChatShape", "CompletionAnswer", "CompletionShape", "Models", "OneModel", "Shape"]

LEAST = -9999.0
"""What stands for the logarithm of nothing, which JSON cannot hold."""

Finish = Literal["stop", "length"]


class OneModel(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int


class Models(BaseModel):
    """All models that are served: one."""

    object: Literal["list"]
    data: list[OneModel]


class Usage(BaseModel):
    """How many tokens were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Logprobs(BaseModel):
    """The tokens of a completion, one entry each in every list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One text."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Finish


class CompletionAnswer(BaseModel):
    """Every text that was asked for, the first prompt's first."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    """A token that could have been drawn."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    """A token that was drawn."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of an answer."""

    content: list[TokenLogprob]
    refusal: None


class ChatMessage(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatAnswer(BaseModel):
    """Every answer that was asked for."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Shape(Protocol):
    """How a route words its answers."""

    prefix: str
    whole_object: str
    piece_object: str
    scored: bool
    """Whether tokens are sent with their log-probabilities."""

    def whole(self, index: int, text: Piece) -> dict[str, Any]:
        """A choice that is complete."""
        ...

    def piece(self, index: int, text: Piece) -> dict[str, Any]:
        """A choice as far as it grew."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream sends of a choice before its first piece."""
        ...


class CompletionShape:
    """/v1/completions."""

    prefix = "cmpl-"
    whole_object = piece_object = "text_completion"

    def __init__(self, texts: TokenTexts, *, scored: bool) -> None:
        self._texts, self.scored = texts, scored

    def whole(self, index: int, text: Piece) -> dict[str, Any]:
        """A choice that is complete."""
        logprobs = self._logprobs(text.scored) if self.scored else None
        return {"index": index, "text": text.text, "logprobs": logprobs, "finish_reason": text.finish}

    piece = whole

    def opening(self, index: int) -> None:
        """Nothing: a stream begins with text."""

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]:
        return {
            "tokens": [self._texts.name_of(entry.token) for entry in scored],
            "token_logprobs": [_number(entry.score.logprob) for entry in scored],
            "top_logprobs": [self._top(entry.token, entry.score) for entry in scored],
            "text_offset": [entry.offset for entry in scored],
        }

    def _top(self, token: int, score: Logprob) -> dict[str, float | None] | None:
        """The likeliest tokens and the token itself, by name; of two with one name, the likelier."""
        if score.logprob is None:
            return None
        found: dict[str, float | None] = {}
        for other, logprob in (*score.top, (token, score.logprob)):
            found.setdefault(self._texts.name_of(other), _number(logprob))
        return found


class ChatShape:
    """/v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_object, piece_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, *, scored: bool) -> None:
        self._texts, self.scored = texts, scored

    def whole(self, index: int, text: Piece) -> dict[str, Any]:
        """A choice that is complete."""
        message = {"role": "assistant", "content": text.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(text.scored),
            "finish_reason": text.finish,
        }

    def piece(self, index: int, text: Piece) -> dict[str, Any]:
        """A choice as far as it grew."""
        delta = {"content": text.text} if text.text or text.scored else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(text.scored), "finish_reason": text.finish}

    def opening(self, index: int) -> dict[str, Any]:
        """Whose turn it is."""
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if not self.scored:
            return None
        content = [
            self._token(entry.token, entry.score.logprob)
            | {"top_logprobs": [self._token(*other) for other in entry.score.top]}
            for entry in scored
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._texts.name_of(token),
            "bytes": list(self._texts.bytes_of(token)),
            "logprob": _number(logprob),
        }


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
