"""The text of single tokens, as log-probabilities name them."""

from __future__ import annotations

import functools
import json
import re

from whimbrel.text import Tokenizer
from whimbrel.text.bytelevel import BYTE_OF_CHARACTER

__all__ = ["TokenTexts"]

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "▁"


class TokenTexts:
    """The bytes of each token, and a name for it: its text, or `bytes:\\xe2\\x80` where it is no whole character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        content = json.loads(tokenizer.to_json())
        self._pipeline = tokenizer.pipeline
        self._added: dict[int, bytes] = {token["id"]: token["content"].encode() for token in content["added_tokens"]}
        self._spelled_in_bytes = '"ByteLevel"' in json.dumps(content["decoder"])
        self.bytes_of = functools.lru_cache(maxsize=None)(self._bytes_of)  # a vocabulary at most
        self.longest = max(len(self.bytes_of(token)) for token in range(tokenizer.vocab_size))
        """Bytes of the longest token."""
        self.shrinks = content["normalizer"] is not None
        """Whether text may become shorter before it is cut into tokens."""

    def name_of(self, token: int) -> str:
        """The token's text, or its bytes spelled out."""
        text = self.bytes_of(token)
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        spelled: str = (
            self._pipeline.id_to_token(token) or ""
        )  # a model may have more ids than its tokenizer has tokens
        if self._spelled_in_bytes:
            return bytes(BYTE_OF_CHARACTER[character] for character in spelled)
        if found := BYTE_TOKEN.fullmatch(spelled):
            return bytes.fromhex(found[1])
        return spelled.replace(SPACE, " ").encode()
