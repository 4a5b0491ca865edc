"""Byte-level BPE: the GPT-2 tokenizer, training of new tokenizers, and `tiktoken` as a faster encoder."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from importlib import resources
from typing import Any

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str as GPT2_SPLIT_PATTERN  # type: ignore[import-untyped]
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Pipeline

from whimbrel.base.errors import ConfigError, DataError

__all__ = ["BYTE_DECODER", "END_OF_TEXT", "MAX_VOCAB_SIZE", "gpt2_pipeline", "tiktoken_encoder", "train_bpe"]

END_OF_TEXT = "<|endoftext|>"

MIN_VOCAB_SIZE = 257
"""The 256 bytes and the end-of-text token."""
MAX_VOCAB_SIZE = 1 << 24
"""Far above any real vocabulary. The tokenizer libraries allocate memory for every id up to the largest."""
MAX_FREQUENCY = (1 << 63) - 1


def _byte_decoder() -> dict[str, int]:
    """GPT-2's characters for bytes, in id order: printable Latin-1 maps to itself, the rest to U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(0x100)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


BYTE_DECODER = _byte_decoder()
"""The byte of each character in the vocabulary of a byte-level BPE (GPT-2's `byte_decoder`)."""


def _byte_level_pipeline(model: models.BPE) -> Pipeline:
    """A BPE model with GPT-2's splitting regex and byte alphabet, without normalization."""
    pipeline = Pipeline(model)
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


def gpt2_pipeline() -> Pipeline:
    """The GPT-2 tokenizer, built from its 50,000 merges.

    Ids 0 to 255 are the bytes, then there is one id for each merge in order, then end-of-text (50256).
    """
    compressed = resources.files("whimbrel.tokenization").joinpath("gpt2_merges.txt.gz").read_bytes()
    merges = [
        (left, right) for left, right in (line.split(" ") for line in gzip.decompress(compressed).decode().splitlines())
    ]
    tokens = [*BYTE_DECODER, *(left + right for left, right in merges)]
    pipeline = _byte_level_pipeline(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    pipeline.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return pipeline


def train_bpe(texts: Iterable[str], vocab_size: int, min_frequency: int) -> Pipeline:
    """Train a byte-level BPE with the layout of GPT-2's: bytes, merges in the order learned, end-of-text."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size: expected at least {MIN_VOCAB_SIZE} (256 bytes and end-of-text), got {vocab_size}"
        )
    if vocab_size > MAX_VOCAB_SIZE:
        raise ConfigError(f"vocab_size: expected at most {MAX_VOCAB_SIZE:,}, got {vocab_size}")
    if not 1 <= min_frequency <= MAX_FREQUENCY:
        raise ConfigError(f"min_frequency: expected 1 to {MAX_FREQUENCY:,}, got {min_frequency}")
    pipeline = _byte_level_pipeline(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    characters = 0

    def counting_iterator() -> Iterable[str]:
        nonlocal characters
        for text in texts:
            characters += len(text)
            yield text

    pipeline.train_from_iterator(counting_iterator(), trainer)
    if not characters:
        raise DataError("no text to train a tokenizer on: the source is empty")
    pipeline.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return pipeline


def tiktoken_encoder(pipeline: Pipeline, content: dict[str, Any]) -> tiktoken.Encoding | None:
    """A `tiktoken` encoder with the same ids as `pipeline`, about five times as fast; None if ids could differ.

    `content` is the parsed tokenizer.json of `pipeline`. That file lists merges one by one, while `tiktoken` merges any
    two neighbors whose joined bytes are a token, lowest id first. Both yield the same ids if merges and ids are in the
    same order and every token is the result of its own merges, which is checked here.
    """
    if not _splits_like_gpt2(content):
        return None
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    tokens = {token: rank for token, rank in content["model"]["vocab"].items() if token not in added}
    if not _merges_by_rank(pipeline, content["model"], tokens):
        return None
    ranks = {bytes(BYTE_DECODER[character] for character in token): rank for token, rank in tokens.items()}
    return tiktoken.Encoding("whimbrel", pat_str=GPT2_SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=added)


def _splits_like_gpt2(content: dict[str, Any]) -> bool:
    splitter, model = content["pre_tokenizer"] or {}, content["model"]
    unsupported = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    return (
        content["normalizer"] is None
        and splitter.get("type") == "ByteLevel"
        and splitter.get("add_prefix_space") is False
        and splitter.get("use_regex", True) is True
        and model["type"] == "BPE"
        and not any(model.get(key) for key in unsupported)
        and all(token["special"] for token in content["added_tokens"])
    )


def _merges_by_rank(pipeline: Pipeline, model: dict[str, Any], tokens: dict[str, int]) -> bool:
    """Whether merges are in id order, every byte is a token, and every token is the result of its own merges."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    merged = [left + right for left, right in pairs]
    ranks = [tokens.get(token, -1) for token in merged]
    return (
        ranks == sorted(set(ranks))
        and tokens.keys() == BYTE_DECODER.keys() | set(merged)
        and all(len(pipeline.model.tokenize(token)) == 1 for token in merged)
    )
