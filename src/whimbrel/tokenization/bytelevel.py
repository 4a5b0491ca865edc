"""Byte-level BPE files as `tiktoken` encoders: about five times the speed of the general pipeline, the same ids.

A `tokenizer.json` names its merges one by one; `tiktoken` merges any two neighbours whose joint bytes are a token,
lowest id first. The two agree when merges and ids stand in the same order and every token is reached by its own merges;
`fast_encoder` checks exactly that and declines (None) where it does not hold.
"""

from __future__ import annotations

from typing import Any

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str as GPT2_SPLIT  # type: ignore[import-untyped]
from tokenizers import Tokenizer as Pipeline

__all__ = ["BYTE_OF_CHARACTER", "fast_encoder"]


def _byte_alphabet() -> dict[str, int]:
    """The character that spells each byte, in GPT-2's id order: the visible Latin-1 ones, then the rest from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(0x100)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_alphabet()


def fast_encoder(pipeline: Pipeline, content: dict[str, Any]) -> tiktoken.Encoding | None:
    """A `tiktoken` encoder with the ids of `pipeline`, whose parsed file is `content`; None where ids could differ."""
    if not _splits_like_gpt2(content):
        return None
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    tokens = {token: rank for token, rank in content["model"]["vocab"].items() if token not in added}
    if not _merges_by_rank(pipeline, content["model"], tokens):
        return None
    ranks = {bytes(BYTE_OF_CHARACTER[character] for character in token): rank for token, rank in tokens.items()}
    return tiktoken.Encoding("whimbrel", pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens=added)


def _splits_like_gpt2(content: dict[str, Any]) -> bool:
    splitter, model = content["pre_tokenizer"] or {}, content["model"]
    unusual = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    return (
        content["normalizer"] is None
        and splitter.get("type") == "ByteLevel"
        and splitter.get("add_prefix_space") is False
        and splitter.get("use_regex", True) is True
        and model["type"] == "BPE"
        and not any(model.get(key) for key in unusual)
        and all(token["special"] for token in content["added_tokens"])
    )


def _merges_by_rank(pipeline: Pipeline, model: dict[str, Any], tokens: dict[str, int]) -> bool:
    """True if merges stand in id order, every byte is a token, and every token is reached by its own merges."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    made = [left + right for left, right in pairs]
    ranks = [tokens.get(token, -1) for token in made]
    return (
        ranks == sorted(set(ranks))
        and tokens.keys() == BYTE_OF_CHARACTER.keys() | set(made)
        and all(len(pipeline.model.tokenize(token)) == 1 for token in made)
    )
