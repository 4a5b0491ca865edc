"""One text that a client asked for, as it grows: what can be sent of it now, and the scores of its tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from whimbrel.generate import Event, Score, TextStream
from whimbrel.serve.prompts import Prompt
from whimbrel.serve.tokens import TokenTexts
from whimbrel.text import Tokenizer

__all__ = ["Choice", "Piece", "Scored", "Source"]

SPACING = 16
"""Tokens before a text that settle how it is spaced."""


class Scored(NamedTuple):
    """A token, how likely it was, and where its text begins."""

    token: int
    score: Score
    offset: int


@dataclass(slots=True)
class Piece:
    """What can be sent of a choice."""

    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    finish: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.scored or self.finish)

    def extend(self, other: Piece) -> None:
        """Go on with what comes after this."""
        self.text += other.text
        self.scored += other.scored
        self.finish = other.finish or self.finish


@dataclass(slots=True)
class Source:
    """What the choices of one prompt share."""

    prompt: Prompt
    stops: Sequence[str]
    """Strings that end a text."""
    echo: bool
    """Whether the prompt stands before it."""
    scores: Sequence[Score] = ()
    """Of the prompt's tokens, where they were asked for."""

    def opening(self, texts: TokenTexts) -> Piece:
        """The prompt, as it stands before an echoed text."""
        if not self.echo:
            return Piece()
        offset, scored, reader = 0, [], _characters()
        for token, score in zip(self.prompt.ids, self.scores, strict=False):
            scored.append(Scored(token, score, offset))
            offset += len(reader.decode(texts.bytes_of(token)))
        return Piece(self.prompt.text, scored)


class Choice:
    """Takes the events of one sample."""

    def __init__(self, index: int, source: Source, tokenizer: Tokenizer, texts: TokenTexts, *, scored: bool) -> None:
        self.index, self.source = index, source
        self.finish: str | None = None
        self.tokens = 0
        """How many were drawn."""
        self._texts, self._opened = texts, False
        self._stream = TextStream(tokenizer, source.prompt.ids[-SPACING:], source.stops)
        self._pending: list[Scored] | None = [] if scored else None
        self._shown = self._known = len(source.prompt.text)  # characters, from the beginning of the prompt
        self._reader = _characters()

    def take(self, event: Event) -> Piece:
        """What the event adds to the text; nothing once a stop string has ended it."""
        if self.finish is not None:
            return Piece()
        piece = Piece()
        if not self._opened and (event.token is not None or event.finish is not None):
            self._opened = True
            piece = self.source.opening(self._texts)
        text = ""
        if event.token is not None:
            self.tokens += 1
            text = self._stream.push(event.token)
            self._note(event)
        if self._stream.stopped:
            self.finish = "stop"
        elif event.finish is not None:
            self.finish = event.finish
            text += self._stream.flush()
        self._shown += len(text)
        piece.extend(Piece(text, self._settled(), self.finish))
        return piece

    def _note(self, event: Event) -> None:
        """Keep the score of a token until its text is sent."""
        if self._pending is None or event.token is None:
            return
        self._pending.append(Scored(event.token, Score(event.logprob, event.top), self._known))
        self._known += len(self._reader.decode(self._texts.bytes_of(event.token)))

    def _settled(self) -> list[Scored]:
        """Scores of tokens whose text has been sent; at an end that is no stop string, of all."""
        if not self._pending:
            return []
        whole = self.finish is not None and not self._stream.stopped
        settled = [scored for scored in self._pending if whole or scored.offset < self._shown]
        del self._pending[: len(settled)]
        return settled


def _characters() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
