"""The text to go on from to tokens, and tokens to text as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from whimbrel.base.errors import RequestError
from whimbrel.generate.stops import StopStrings
from whimbrel.text import Tokenizer

__all__ = ["TextStream", "encode_prompt", "stream_text"]

BETWEEN_TEXTS = "\n\n"
"""What stands for an end-of-text token after which another text follows."""

UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no character, or not one yet."""

LONGEST_CHARACTER = 4
"""Bytes of a character at most, so also tokens: after as many, bytes that are none will not become one."""


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text to go on from, opened as the tokenizer's file says; nothing opens a new text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # how Python holds the bytes of a command line that are no text
        raise RequestError(f"the text is not valid UTF-8 at character {error.start}: give valid Unicode") from error
    ids: list[int] = tokenizer.pipeline.encode(text).ids
    return ids or [tokenizer.eot_id]


class TextStream:
    """Tokens to text, in pieces that can be shown at once: whole characters, and no beginning of a stop string.

    The prompt settles how the first piece is spaced. `tokenizers.decoders.DecodeStream` does as much for most
    tokenizers, but fails at bytes that are no text where bytes are tokens, and models do write them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = StopStrings(stops)
        self._known, self._new = list(prompt_ids), list[int]()
        self._shown = self._decoded(self._known).rstrip(UNFINISHED)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met: the text before it has been handed out, and no more comes."""
        return self._stops.met

    def push(self, token: int) -> str:
        """Take one more token; the text that can be shown now."""
        return self._stops.push(self._whole_characters(token))

    def flush(self) -> str:
        """What was held back for the rest of a character or of a stop string, once there are no more tokens."""
        return self._stops.push(self._rest()) + self._stops.flush()

    def _whole_characters(self, token: int) -> str:
        if token == self._tokenizer.eot_id:
            return self._rest() + BETWEEN_TEXTS
        self._new.append(token)
        piece = self._decoded(self._known + self._new)[len(self._shown) :]
        if not piece or (piece.endswith(UNFINISHED) and len(self._new) < LONGEST_CHARACTER):
            return ""
        self._known, self._new = self._new, []
        self._shown = self._decoded(self._known)
        return piece

    def _rest(self) -> str:
        """Whole characters that came with the beginning of another, which will not be finished."""
        rest = self._decoded(self._known + self._new)[len(self._shown) :].rstrip(UNFINISHED)
        self._new = []
        return rest

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.pipeline.decode(ids, skip_special_tokens=True))


def stream_text(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], tokens: Iterable[int], stops: Sequence[str] = ()
) -> Iterator[str]:
    """The text of `tokens` in pieces of whole characters, up to the first of `stops`, which are checked at once."""
    return _pieces(TextStream(tokenizer, prompt_ids, stops), tokens)


def _pieces(text: TextStream, tokens: Iterable[int]) -> Iterator[str]:
    for token in tokens:
        if piece := text.push(token):
            yield piece
        if text.stopped:
            return
    if rest := text.flush():
        yield rest
