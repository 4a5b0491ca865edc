"""The text to go on from to tokens, and tokens to text as they come."""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from whimbrel.base.errors import RequestError
from whimbrel.tokenization import Tokenizer
from whimbrel.tokenization.bpe import BYTE_DECODER

__all__ = ["Detokenizer", "StopStrings", "TextStream", "encode_prompt", "stream_text"]

BETWEEN_TEXTS = "\n\n"
"""What stands for an end-of-text token after which another text follows."""

NO_CHARACTER = "\ufffd"
"""What a decoder writes for bytes that are no character, or not one yet."""

LONGEST_CHARACTER = 4
"""Bytes of a character at most, so also tokens."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""How tokenizers that spell tokens in characters spell one that is a byte."""


def encode_prompt(
    tokenizer: Tokenizer, text: str, *, parse_special: bool = True, bos_id: int | None = None
) -> list[int]:
    """The ids of a raw text prompt, as transformers' `tokenizer(text)` gives them.

    Special tokens in the text are parsed (`<|im_start|>` is one token) unless `parse_special` is false. An empty prompt
    is `bos_id`, or the tokenizer's own where that is not given.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:  # how Python holds the bytes of a command line that are no text
        raise RequestError(f"the text is not valid UTF-8 at character {error.start}: give valid Unicode") from error
    ids = tokenizer.encode_prompt(text, parse_special=parse_special).ids
    return ids or [tokenizer.bos_id if bos_id is None else bos_id]


class Detokenizer:
    """Tokens to characters, each as soon as it is whole, and where in the text each token stands.

    The tokenizer's decoder says what a token adds after the one before it, spaces above all. It cannot say which bytes
    are a character's first and which are none, so tokens that hold such bytes are read byte by byte.
    `tokenizers.decoders.DecodeStream` fails at bytes that are no text where bytes are tokens, and models do write them.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), *, specials: bool = False) -> None:
        """Go on after the tokens `before`; special ones are left out unless `specials` are to be spelled."""
        added = {} if specials else tokenizer.pipeline.get_added_tokens_decoder()
        self._left_out = {token for token, content in added.items() if content.special}
        self._pipeline, self._specials = tokenizer.pipeline, specials
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")
        self._last: list[int] = []
        for token in self._last_texts(before):
            self._reader.decode(self.added_by(token))
            self._last = [token]
        self._begun_before = self._unfinished
        self._written = 0
        self.span = (0, 0)
        """Where the last token's text begins and ends; a character that is not whole yet counts as one."""

    def push(self, token: int) -> str:
        """Take one more token; the characters that are whole now."""
        added = self.added_by(token)
        if self._is_text(token):
            self._last = [token]
        if not added:
            self.span = (self._written, self._written)
            return ""
        text = self._reader.decode(added[:1])
        broken = len(text) - (not self._unfinished)  # 1 where that byte does not go on with the character under way
        text += self._reader.decode(added[1:])
        if self._begun_before:
            text, broken, self._begun_before = text[broken:], 0, False
        start = self._written + broken
        self._written += len(text)
        self.span = (start, self._written + self._unfinished)
        return text

    def insert(self, text: str) -> str:
        """Write something else in place of a token: a character that is not whole yet will not be."""
        self._reader.reset()
        start, self._written = self._written, self._written + len(text)
        self.span = (start, self._written)
        return text

    def added_by(self, token: int) -> bytes:
        """What a token would add to the text."""
        alone, spelled = self._decoded([token]), self._pipeline.id_to_token(token) or ""
        if alone != spelled and (byte := BYTE_TOKEN.fullmatch(spelled)):
            return bytes.fromhex(byte[1])
        if NO_CHARACTER in alone and BYTE_DECODER.keys() >= set(spelled):
            return bytes(BYTE_DECODER[character] for character in spelled)
        return self._decoded([*self._last, token])[len(self._decoded(self._last)) :].encode()

    @property
    def _unfinished(self) -> bool:
        return bool(self._reader.getstate()[0])

    def _last_texts(self, ids: Sequence[int]) -> list[int]:
        """As many of the last tokens as may hold a character between them, of those that are text at all."""
        texts = (token for token in reversed(ids) if self._is_text(token))
        return [*itertools.islice(texts, LONGEST_CHARACTER)][::-1]

    def _is_text(self, token: int) -> bool:
        return token not in self._left_out and self._pipeline.id_to_token(token) is not None

    def _decoded(self, ids: list[int]) -> str:
        return str(self._pipeline.decode(ids, skip_special_tokens=not self._specials))


class TextStream:
    """Tokens to text, in pieces that can be shown at once: whole characters, and no beginning of a stop string.

    The prompt settles how the first piece is spaced.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._eot_id = tokenizer.eot_id
        self._characters = Detokenizer(tokenizer, prompt_ids)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met: the text before it has been handed out, and no more comes."""
        return self._stops.met

    @property
    def span(self) -> tuple[int, int]:
        """From where to where in the text that of the last token goes, were there no stop strings."""
        return self._characters.span

    def push(self, token: int) -> str:
        """Take one more token; the text that can be shown now."""
        ends = token == self._eot_id
        return self._stops.push(self._characters.insert(BETWEEN_TEXTS) if ends else self._characters.push(token))

    def flush(self) -> str:
        """What was held back for the rest of a stop string, once there are no more tokens."""
        return self._stops.flush()


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


class StopStrings:
    """Lets text through in pieces, but for what may yet become a stop string, and nothing from the first one on.

    The stop string that ends first is the one met, so it does not matter how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str) or not all(stops):
            raise RequestError(f"stop strings {stops!r} must be a list of texts, none of them empty")
        self.met = False
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that is certain to come before a stop string."""
        if self.met:
            return ""
        text = self._held + piece
        places = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.met, self._held = True, ""
            return text[: min(places)[1]]
        safe = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
