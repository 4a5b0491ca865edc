"""From generated tokens to text: incremental decoding, and stop strings."""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from whimbrel.base.errors import RequestError
from whimbrel.tokenization import Tokenizer
from whimbrel.tokenization.bpe import BYTE_DECODER

__all__ = ["Detokenizer", "StopStrings", "TextStream", "partial_match", "stream_text"]

TEXT_SEPARATOR = "\n\n"
"""Replaces an end-of-text token in the middle of the output."""

REPLACEMENT = "\ufffd"
"""Emitted by decoders for invalid or incomplete UTF-8."""

MAX_UTF8_BYTES = 4
"""Maximum number of bytes, and therefore tokens, per character."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""Spelling of byte tokens in SentencePiece vocabularies."""

MAX_CACHED_TOKENS = 2**16


class Detokenizer:
    """Incremental decoding: each character as soon as it is complete, and the span of each token in the text.

    The tokenizer's decoder determines what a token adds after the previous one, such as a space. It cannot tell bytes
    that start a character from invalid bytes, so tokens with such bytes are decoded byte by byte.
    `tokenizers.decoders.DecodeStream` fails on invalid UTF-8 from byte tokens, which models do generate.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prefix_ids: Sequence[int] = (),
        *,
        keep_special: bool = False,
        kept_tokens: Collection[str] = (),
    ) -> None:
        """Continue after the tokens `prefix_ids`. Special tokens are skipped, unless `keep_special`, or `kept_tokens`
        contains them.
        """
        added = {} if keep_special else tokenizer.pipeline.get_added_tokens_decoder()
        special = {token: added_token.content for token, added_token in added.items() if added_token.special}
        self._skipped = special.keys()
        self._kept = {token: content.encode() for token, content in special.items() if content in kept_tokens}
        self._pipeline, self._keep_special = tokenizer.pipeline, keep_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._last: list[int] = []  # the previous token with text
        self._token_bytes: dict[tuple[int, ...], bytes] = {}  # by previous token and token
        # A character has at most MAX_UTF8_BYTES tokens.
        text_tokens = (token for token in reversed(prefix_ids) if self._has_text(token))
        for token in reversed([*itertools.islice(text_tokens, MAX_UTF8_BYTES)]):
            self._utf8.decode(self.token_bytes(token))
            self._last = [token]
        self._starts_mid_character = self._is_incomplete
        self._length = 0
        self.span = (0, 0)
        """Start and end of the last token's text; an incomplete character counts as one."""

    def push(self, token: int) -> str:
        """Add a token; returns the characters that are complete now."""
        new_bytes = self.token_bytes(token)
        if self._has_text(token):
            self._last = [token]
        if not new_bytes:
            self.span = (self._length, self._length)
            return ""
        text = self._utf8.decode(new_bytes[:1])
        num_invalid = len(text) - (not self._is_incomplete)  # 1 if the byte does not continue the incomplete character
        text += self._utf8.decode(new_bytes[1:])
        if self._starts_mid_character:
            text, num_invalid, self._starts_mid_character = text[num_invalid:], 0, False
        start = self._length + num_invalid
        self._length += len(text)
        self.span = (start, self._length + self._is_incomplete)
        return text

    def insert(self, text: str) -> str:
        """Emit `text` instead of the text of a token; an incomplete character is dropped."""
        self._utf8.reset()
        start, self._length = self._length, self._length + len(text)
        self.span = (start, self._length)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token would add to the text."""
        if token in self._kept:
            return self._kept[token]
        key = (*self._last, token)
        if key not in self._token_bytes:
            if len(self._token_bytes) == MAX_CACHED_TOKENS:
                self._token_bytes.clear()
            self._token_bytes[key] = self._decode_bytes(token)
        return self._token_bytes[key]

    def _decode_bytes(self, token: int) -> bytes:
        alone, spelling = self._decode([token]), self._pipeline.id_to_token(token) or ""
        if alone != spelling and (byte := BYTE_TOKEN.fullmatch(spelling)):
            return bytes.fromhex(byte[1])
        if REPLACEMENT in alone and BYTE_DECODER.keys() >= set(spelling):
            return bytes(BYTE_DECODER[character] for character in spelling)
        return self._decode([*self._last, token])[len(self._decode(self._last)) :].encode()

    @property
    def _is_incomplete(self) -> bool:
        """Whether the bytes so far end within a character."""
        return bool(self._utf8.getstate()[0])

    def _has_text(self, token: int) -> bool:
        return token not in self._skipped and self._pipeline.id_to_token(token) is not None

    def _decode(self, ids: list[int]) -> str:
        return str(self._pipeline.decode(ids, skip_special_tokens=not self._keep_special))


class StopStrings:
    """Passes text through in pieces, up to the first stop string; text that may become one is held back.

    The stop string that ends first wins, so the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str) or not all(stops):
            raise RequestError(f"stop: expected a list of non-empty strings, got {stops!r}")
        self.found = False
        self._stops = tuple(stops)
        self._held_back = ""

    def push(self, piece: str) -> str:
        """Add text; returns the part that cannot belong to a stop string."""
        if self.found:
            return ""
        if not self._stops:
            return piece
        text = self._held_back + piece
        matches = [(index + len(stop), index) for stop in self._stops if (index := text.find(stop)) >= 0]
        if matches:
            self.found, self._held_back = True, ""
            return text[: min(matches)[1]]
        safe = len(text) - max(partial_match(text, stop) for stop in self._stops)
        self._held_back = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """The text held back so far; call after the last piece."""
        held_back, self._held_back = self._held_back, ""
        return held_back


def partial_match(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class TextStream:
    """Converts tokens to text that is safe to show: complete characters only, up to the first stop string.

    The prompt determines the spacing of the first piece.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str] = (),
        *,
        kept_tokens: Collection[str] = (),
    ) -> None:
        """`kept_tokens` are special tokens that become text; others are skipped."""
        self._eot_id = tokenizer.eot_id
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, kept_tokens=kept_tokens)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: all text before it has been returned."""
        return self._stops.found

    @property
    def span(self) -> tuple[int, int]:
        """Start and end of the last token's text, as if there were no stop strings."""
        return self._detokenizer.span

    def push(self, token: int) -> str:
        """Add a token; returns the text that can be shown now."""
        if token == self._eot_id:
            return self._stops.push(self._detokenizer.insert(TEXT_SEPARATOR))
        return self._stops.push(self._detokenizer.push(token))

    def flush(self) -> str:
        """The text held back for a stop string; call after the last token."""
        return self._stops.flush()


def stream_text(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], tokens: Iterable[int], stops: Sequence[str] = ()
) -> Iterator[str]:
    """The text of `tokens` in pieces of complete characters, up to the first of `stops` (validated immediately)."""
    return _pieces(TextStream(tokenizer, prompt_ids, stops), tokens)


def _pieces(text: TextStream, tokens: Iterable[int]) -> Iterator[str]:
    for token in tokens:
        if piece := text.push(token):
            yield piece
        if text.stopped:
            return
    if rest := text.flush():
        yield rest
