"""A tokenizer with one token per byte: small and fast to load."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from whimbrel.tokenization import Tokenizer


def byte_tokenizer(special: Sequence[str] = ("<|endoftext|>",)) -> Tokenizer:
    """256 bytes and special tokens, of which the first is the end-of-text token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pipeline = Pipeline(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(token, special=True) for token in special])
    return Tokenizer(pipeline, special[0])
