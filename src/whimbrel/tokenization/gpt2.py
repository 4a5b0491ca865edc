"""The GPT-2 tokenizer, derived whole from its 50,000 merges: the vocabulary and every id follow from their order."""

from __future__ import annotations

import gzip
from importlib import resources

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from whimbrel.tokenization.bytelevel import BYTE_OF_CHARACTER

__all__ = ["END_OF_TEXT", "byte_level_pipeline", "gpt2_pipeline"]

END_OF_TEXT = "<|endoftext|>"
"""The token that opens every document."""


def byte_level_pipeline(model: models.BPE) -> Pipeline:
    """GPT-2's way around a BPE model: split by its regex, spell bytes as characters, normalise nothing."""
    pipeline = Pipeline(model)
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


def gpt2_pipeline() -> Pipeline:
    """Ids 0 to 255 are the bytes, then one id for each merge in order, then end-of-text (50256)."""
    packed = resources.files("whimbrel.tokenization").joinpath("gpt2_merges.txt.gz").read_bytes()
    merges = [
        (left, right) for left, right in (line.split(" ") for line in gzip.decompress(packed).decode().splitlines())
    ]
    tokens = [*BYTE_OF_CHARACTER, *(left + right for left, right in merges)]
    pipeline = byte_level_pipeline(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    pipeline.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return pipeline
