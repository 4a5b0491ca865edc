"""One text that a client asked for, as it grows: what can be sent of it now, and the scores of its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from whimbrel.inference import Event, Logprob, TextStream
from whimbrel.inference.detokenizer import Detokenizer
from whimbrel.server.prompts import Prompt
from whimbrel.tokenization import Tokenizer

__all__ = ["Choice", "Piece", "Scored", "Source"]


class Scored(NamedTuple):
    """A token, how likely it was, and where its text begins."""

    token: int
    score: Logprob
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
    scores: Sequence[Logprob] = ()
    """Of the prompt's tokens, where they were asked for."""

    def opening(self, tokenizer: Tokenizer) -> Piece:
        """The prompt, as it stands before an echoed text."""
        if not self.echo:
            return Piece()
        offsets = self.prompt.offsets
        if offsets is None:
            offsets = _decoded_offsets(tokenizer, self.prompt.ids[: len(self.scores)])
        scored = [Scored(*entry) for entry in zip(self.prompt.ids, self.scores, offsets, strict=False)]
        return Piece(self.prompt.text, scored)


def _decoded_offsets(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, ...]:
    """The offset of each token in the decoded text, with special tokens included."""
    characters, offsets = Detokenizer(tokenizer, specials=True), []
    for token in ids:
        characters.push(token)
        offsets.append(characters.span[0])
    return tuple(offsets)


class Choice:
    """Takes the events of one sample."""

    def __init__(self, index: int, source: Source, tokenizer: Tokenizer, *, scored: bool) -> None:
        self.index, self.source = index, source
        self.finish: str | None = None
        self.tokens = 0
        """How many were drawn."""
        self._tokenizer, self._opened = tokenizer, False
        self._stream = TextStream(tokenizer, source.prompt.ids, source.stops)
        self._shown = 0
        self._pending: deque[tuple[int, Scored]] | None = deque() if scored else None
        """Scores, each with how much text must have been sent before it is."""

    def take(self, event: Event) -> Piece:
        """What the event adds to the text; nothing once a stop string has ended it."""
        if self.finish is not None:
            return Piece()
        piece = Piece()
        if not self._opened and (event.token is not None or event.finish_reason is not None):
            self._opened = True
            piece = self.source.opening(self._tokenizer)
        text = ""
        if event.token is not None:
            self.tokens += 1
            text = self._stream.push(event.token)
            self._note(event)
        if self._stream.stopped:
            self.finish = "stop"
        elif event.finish_reason is not None:
            self.finish = event.finish_reason
            text += self._stream.flush()
        self._shown += len(text)
        piece.extend(Piece(text, self._settled(), self.finish))
        return piece

    def _note(self, event: Event) -> None:
        """Keep the score of a token until its text is sent, or all before it where it has none."""
        if self._pending is None or event.token is None:
            return
        start, end = self._stream.span
        scored = Scored(event.token, Logprob(event.logprob, event.top), len(self.source.prompt.text) + start)
        self._pending.append((min(start + 1, end), scored))

    def _settled(self) -> list[Scored]:
        """Scores of tokens whose text has been sent; at an end that is no stop string, of all."""
        whole = self.finish is not None and not self._stream.stopped
        settled = []
        while self._pending and (whole or self._pending[0][0] <= self._shown):
            settled.append(self._pending.popleft()[1])
        return settled
