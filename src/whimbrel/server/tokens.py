"""The text of single tokens, as log-probabilities name them."""

from __future__ import annotations

import functools

from whimbrel.inference.detokenizer import Detokenizer
from whimbrel.tokenization import Tokenizer

__all__ = ["TokenTexts"]


MAX_COMPOSED = 4
"""Maximum number of characters that Unicode normalization composes into one. Ordinary text never needs more."""


class TokenTexts:
    """The bytes of each token, and a name for it: its text, or `bytes:\\xe2\\x80` where it is no whole character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        amid = Detokenizer(tokenizer, [tokenizer.eot_id], specials=True)  # after any token, a space is kept
        self.bytes_of = functools.lru_cache(maxsize=None)(amid.added_by)  # a vocabulary at most
        self.longest = max(map(len, map(self.bytes_of, set(tokenizer.pipeline.get_vocab().values()))))
        """Bytes of the longest token."""
        shrinks = tokenizer.pipeline.normalizer is not None
        self.max_characters = self.longest * (MAX_COMPOSED if shrinks else 1)
        """Maximum number of prompt characters per token."""

    def name_of(self, token: int) -> str:
        """The token's text, or its bytes spelled out."""
        text = self.bytes_of(token)
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
