"""Tokens to text as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tokenizers.decoders import DecodeStream

from whimbrel.text import Tokenizer

__all__ = ["stream_text"]


BETWEEN_TEXTS = "\n\n"
"""What stands for an end-of-text token after which another text follows."""


def stream_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """The text of `tokens` in pieces of whole characters; the prompt settles how the first piece is spaced."""
    decoder = DecodeStream(skip_special_tokens=True)
    for token in prompt_ids:
        decoder.step(tokenizer.pipeline, token)
    for token in tokens:
        ends = token == tokenizer.eot_id
        if piece := BETWEEN_TEXTS if ends else decoder.step(tokenizer.pipeline, token):
            yield piece
