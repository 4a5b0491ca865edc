"""The text to go on from to tokens, and tokens to text as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tokenizers.decoders import DecodeStream

from whimbrel.base.errors import RequestError
from whimbrel.text import Tokenizer

__all__ = ["encode_prompt", "stream_text"]

BETWEEN_TEXTS = "\n\n"
"""What stands for an end-of-text token after which another text follows."""


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text to go on from, opened as the tokenizer's file says; nothing opens a new text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # how Python holds the bytes of a command line that are no text
        raise RequestError(f"the text is not valid UTF-8 at character {error.start}: give valid Unicode") from error
    ids: list[int] = tokenizer.pipeline.encode(text).ids
    return ids or [tokenizer.eot_id]


def stream_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """The text of `tokens` in pieces of whole characters; the prompt settles how the first piece is spaced."""
    decoder = DecodeStream(skip_special_tokens=True)
    for token in prompt_ids:
        decoder.step(tokenizer.pipeline, token)
    for token in tokens:
        ends = token == tokenizer.eot_id
        if piece := BETWEEN_TEXTS if ends else decoder.step(tokenizer.pipeline, token):
            yield piece
