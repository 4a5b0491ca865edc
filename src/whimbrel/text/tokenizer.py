"""`Tokenizer`: any Hugging Face `tokenizer.json`, with `tiktoken` as the encoder where it gives the same ids faster."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Pipeline

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.base.files import atomic_file
from whimbrel.text.bytelevel import fast_encoder
from whimbrel.text.gpt2 import END_OF_TEXT, gpt2_pipeline

__all__ = ["Tokenizer", "load_tokenizer"]

TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
DOCUMENT_OPENERS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>", "<s>")
"""Tokens that may open a document where the file's settings name none, in order of preference."""

UNUSED_BY_IDS = ("decoder", "padding", "post_processor", "truncation", "version")
"""Parts of a tokenizer file that change no id of a document."""


class Tokenizer:
    """Text to ids and back. Special tokens written out in a text are plain text: no document can open another."""

    def __init__(self, pipeline: Pipeline, eot_token: str | None = None) -> None:
        pipeline.no_padding()
        pipeline.no_truncation()
        pipeline.encode_special_tokens = True
        content: dict[str, Any] = json.loads(pipeline.to_str())
        vocabulary = pipeline.get_vocab(with_added_tokens=True)
        self.pipeline = pipeline
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.eot_token = _document_opener(content["added_tokens"], vocabulary, eot_token)
        self.eot_id: int = vocabulary[self.eot_token]
        self.fingerprint = _fingerprint(content, vocabulary, self.eot_token)
        self._fast = fast_encoder(pipeline, content)

    @classmethod
    def from_json(cls, text: str, eot_token: str | None = None) -> Tokenizer:
        """The tokenizer that the text of a `tokenizer.json` describes."""
        return cls(Pipeline.from_str(text), eot_token)

    def to_json(self) -> str:
        """The text of this tokenizer's `tokenizer.json`."""
        return str(self.pipeline.to_str())

    @property
    def backend(self) -> str:
        """The library that encodes: `tiktoken` or `tokenizers`."""
        return "tiktoken" if self._fast else "tokenizers"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest shard type that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 65_535 else np.uint32)

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone, nothing added."""
        ids: list[int] = self._ids(text).tolist()
        return ids

    def encode_documents(self, texts: Iterable[str]) -> list[NDArray[Any]]:
        """The ids of each text as an array of `dtype`, opened by the end-of-text token. Threads may call it at once."""
        opener = np.array([self.eot_id], dtype=self.dtype)
        return [np.concatenate((opener, self._ids(text)), dtype=self.dtype, casting="same_kind") for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of `ids`, special tokens written out; bytes that are no whole character become U+FFFD."""
        numbers = [int(index) for index in ids]
        strange = next((index for index in numbers if not 0 <= index < self.vocab_size), None)
        if strange is not None:
            raise DataError(f"token id {strange} is not in the vocabulary: ids run from 0 to {self.vocab_size - 1}")
        return str(self.pipeline.decode(numbers, skip_special_tokens=False))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which `transformers.AutoTokenizer` opens."""
        settings = {
            "bos_token": self.eot_token,
            "clean_up_tokenization_spaces": False,
            "eos_token": self.eot_token,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        with atomic_file(Path(directory) / SETTINGS_FILE, "w") as file:
            file.write(json.dumps(settings, indent=2) + "\n")
        with atomic_file(Path(directory) / TOKENIZER_FILE, "w") as file:  # last: once it is there, all is
            file.write(self.to_json())

    def _ids(self, text: str) -> NDArray[Any]:
        try:
            if self._fast:
                return self._fast.encode_to_numpy(text, disallowed_special=())
            text.encode()  # fails as the fast path does, and says where
            [encoding] = self.pipeline.encode_batch_fast([text], add_special_tokens=False)
        except UnicodeEncodeError as error:
            raise DataError(
                f"text holds half a surrogate pair at character {error.start}: give valid Unicode"
            ) from error
        return np.array(encoding.ids, dtype=np.uint32)


def load_tokenizer(path_or_name: str | os.PathLike[str] = "gpt2") -> Tokenizer:
    """The tokenizer `gpt2`, a `tokenizer.json`, or a directory that holds one (a model, a run's checkpoint)."""
    if str(path_or_name) == "gpt2":
        return _gpt2()
    path = Path(path_or_name)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"no tokenizer at {path}: give 'gpt2', a {TOKENIZER_FILE}, or a directory that holds one")
    try:
        pipeline = Pipeline.from_file(str(file))
    except Exception as error:  # `tokenizers` raises the bare class
        raise DataError(f"{file} is not a Hugging Face {TOKENIZER_FILE}: {error}") from error
    return Tokenizer(pipeline, _named_opener(file.with_name(SETTINGS_FILE)))


@functools.cache
def _gpt2() -> Tokenizer:
    return Tokenizer(gpt2_pipeline(), END_OF_TEXT)


def _named_opener(settings: Path) -> str | None:
    """The end-of-text token that a model directory's own settings name."""
    if not settings.is_file():
        return None
    try:
        named = json.loads(settings.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{settings} is not a JSON object: {error}") from error
    token = named.get("content", named) if isinstance(named, dict) else named
    if token is not None and not isinstance(token, str):
        raise DataError(f"{settings} names the eos_token {json.dumps(token)}: give a token's text or null")
    return token


def _document_opener(added: list[dict[str, Any]], vocabulary: dict[str, int], named: str | None) -> str:
    """The token that opens documents: a special one, because the ids of a text never hold those."""
    special = {token["content"] for token in added if token["special"]}
    for token in DOCUMENT_OPENERS if named is None else (named,):
        if token in special:
            return token
    if named in vocabulary:
        raise DataError(
            f"the end-of-text token '{named}' is not a special token of the tokenizer, so a text can hold it: "
            f"name one of {', '.join(sorted(special)) or 'its special tokens (it has none)'}"
        )
    wanted = " or ".join(DOCUMENT_OPENERS) if named is None else named
    raise DataError(f"the tokenizer has no end-of-text token ({wanted}): add one, it opens every document")


def _fingerprint(content: dict[str, Any], vocabulary: dict[str, int], eot_token: str) -> str:
    """Equal for two files that give equal ids, whether or not they list their special tokens among the model's own."""
    told = {key: value for key, value in content.items() if key not in UNUSED_BY_IDS}
    told["model"] = content["model"] | {"vocab": vocabulary}
    told["eot_id"] = vocabulary[eot_token]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
