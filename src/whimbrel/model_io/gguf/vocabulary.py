"""A `tokenizer.json` in GGUF's own words: tokens, their kinds, merges, and the name of the way text is split."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from whimbrel.base.errors import ConfigError
from whimbrel.model_io.directory import special_tokens
from whimbrel.model_io.tables import read_table
from whimbrel.tokenization import Tokenizer

__all__ = ["write_vocabulary"]

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = rf"{CONTRACTIONS}\p{{N}}{{1,3}}{REST}", rf"{CONTRACTIONS}\p{{N}}{REST}"

SPLITS = {
    (None, "gpt2", False): "gpt-2",
    ("NFC", "gpt2", False): "olmo",
    (None, "digits, gpt2", False): "smollm",
    (None, LLAMA3, True): "llama-bpe",
    (None, LLAMA3, False): "dbrx",
    (None, QWEN2, False): "qwen2",
    ("NFC", QWEN2, False): "qwen2",
}
"""What llama.cpp calls a way to split text, by its normaliser, its splitter and whether whole words skip the merges.

llama.cpp normalises nothing: where a tokenizer does (NFC), the ids of a text that is not in that form differ there.
"""
UNUSUAL = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
"""Settings of a BPE model that llama.cpp does not have."""
ENDS = ("eos", "eot", "eom")
"""The tokens that may end a text, as GGUF tells them apart."""


def write_vocabulary(writer: GGUFWriter, directory: Path, tokenizer: Tokenizer, size: int) -> None:
    """The tokenizer of a model directory, filled up to the `size` rows of the embedding with tokens never used."""
    content: dict[str, Any] = json.loads(tokenizer.to_json())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_name(content))
    _write_tokens(writer, tokenizer, content, size)
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in content["model"]["merges"])
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    _write_special(writer, directory, tokenizer)
    template = _chat_template(directory)
    if template is not None:
        writer.add_chat_template(template)


def _split_name(content: Mapping[str, Any]) -> str:
    model = content["model"]
    if model["type"] != "BPE" or any(model.get(setting) for setting in UNUSUAL):
        raise ConfigError(f"GGUF export knows byte-level BPE tokenizers only, and this one is {_model_in_words(model)}")
    normalizer, splitter = (content[part] or {} for part in ("normalizer", "pre_tokenizer"))
    kind = (normalizer.get("type"), _splitter(splitter), bool(model.get("ignore_merges")))
    if kind not in SPLITS:
        raise ConfigError(
            f"llama.cpp has no name that is known here for how this tokenizer splits text (normalizer "
            f"{json.dumps(content['normalizer'])}, pre_tokenizer {json.dumps(content['pre_tokenizer'])}, ignore_merges "
            f"{json.dumps(kind[2])}): known are the ways of {', '.join(sorted(set(SPLITS.values())))}"
        )
    return SPLITS[kind]


def _model_in_words(model: Mapping[str, Any]) -> str:
    settings = [setting for setting in UNUSUAL if model.get(setting)]
    return f"{model['type']} with {', '.join(settings)}" if settings else f"{model['type']}"


def _splitter(table: Mapping[str, Any]) -> str | None:
    """A pre-tokenizer that ends in bytes, by its regex or by name; None is any other."""
    steps = table.get("pretokenizers", [table])
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if last.get("use_regex", True):
        if not before:
            return "gpt2"
        digits = len(before) == 1 and before[0].get("type") == "Digits" and before[0].get("individual_digits")
        return "digits, gpt2" if digits else None
    if len(before) != 1 or before[0].get("type") != "Split" or before[0].get("behavior") != "Isolated":
        return None
    pattern = before[0]["pattern"].get("Regex")
    return pattern if isinstance(pattern, str) and not before[0].get("invert") else None


def _write_tokens(writer: GGUFWriter, tokenizer: Tokenizer, content: Mapping[str, Any], size: int) -> None:
    if tokenizer.vocab_size > size:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} tokens but the model's vocab_size is {size}")
    special = {token["id"]: token["special"] for token in content["added_tokens"]}
    tokens: list[str] = []
    kinds: list[TokenType] = []
    for index in range(size):
        token = tokenizer.pipeline.id_to_token(index)
        tokens.append(f"[PAD{index}]" if token is None else token)
        if token is None:
            kinds.append(TokenType.UNUSED)
        elif index in special:
            kinds.append(TokenType.CONTROL if special[index] else TokenType.USER_DEFINED)
        else:
            kinds.append(TokenType.NORMAL)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)


def _write_special(writer: GGUFWriter, directory: Path, tokenizer: Tokenizer) -> None:
    """The tokens that open and end a text; always, because a reader that finds none takes some of its own."""
    special = special_tokens(directory)
    opener, closer = _added_to_a_text(tokenizer)
    ends = special.eos_ids or (tokenizer.eot_id,)
    if len(opener) > 1 or (closer and closer != ends[:1]):
        raise ConfigError(
            f"the tokenizer adds the ids {opener} before and {closer} after a text; a GGUF can add the one token that "
            f"opens and the one that ends a text ({ends[0]}): change its post_processor"
        )
    writer.add_bos_token_id(opener[0] if opener else special.opener(tokenizer))
    for name, index in zip(ENDS, ends, strict=False):
        getattr(writer, f"add_{name}_token_id")(index)
    if len(ends) > len(ENDS):
        logging.getLogger(__name__).warning(
            "a GGUF names %d tokens that end a text, left out: %s", len(ENDS), ends[len(ENDS) :]
        )
    writer.add_add_bos_token(bool(opener))
    writer.add_add_eos_token(bool(closer))


def _added_to_a_text(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer's file puts before and after the ids of a text."""
    plain = tokenizer.pipeline.encode("a", add_special_tokens=False).ids
    whole = tokenizer.pipeline.encode("a").ids
    start = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return tuple(whole[:start]), tuple(whole[start + len(plain) :])


def _chat_template(directory: Path) -> Any:
    file, settings = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return read_table(settings).get("chat_template") if settings.is_file() else None
