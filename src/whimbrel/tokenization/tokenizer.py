"""`Tokenizer`: any Hugging Face `tokenizer.json`, with `tiktoken` as the encoder where it gives the same ids faster."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from tokenizers import Tokenizer as Pipeline

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.base.files import atomic_file
from whimbrel.tokenization.bytelevel import fast_encoder
from whimbrel.tokenization.gpt2 import END_OF_TEXT, gpt2_pipeline

__all__ = ["EncodedPrompt", "MAX_VOCABULARY", "Tokenizer", "load_tokenizer"]

TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
DOCUMENT_OPENERS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>", "<s>")
"""Tokens that may open a document where the file's settings name none, in order of preference."""

UNUSED_BY_IDS = ("decoder", "padding", "post_processor", "truncation", "version")
"""Parts of a tokenizer file that change no id of a document."""

MAX_VOCABULARY = 1 << 24
"""Many times the largest vocabulary in use. The libraries allocate for every id up to the largest, used or not."""


class EncodedPrompt(NamedTuple):
    """A prompt as token ids."""

    ids: list[int]
    offsets: list[int]
    """The character of the text at which each token starts."""


class Tokenizer:
    """Text to ids and back.

    `encode` and `encode_documents` treat special tokens that a text spells out as plain text, so no document can end
    another. `encode_prompt` parses them, as transformers, vLLM and llama.cpp do.
    """

    def __init__(self, pipeline: Pipeline, eot_token: str | None = None, bos_token: str | None = None) -> None:
        with _one_line_errors("the tokenizer cannot be used"):
            pipeline.no_padding()
            pipeline.no_truncation()
            pipeline.encode_special_tokens = True
            vocabulary = pipeline.get_vocab(with_added_tokens=True)
            _check_ids(vocabulary)
            content: dict[str, Any] = json.loads(pipeline.to_str())
            pipeline.encode("")  # some broken post-processors only fail when they run
        self.pipeline = pipeline
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.eot_token = _document_opener(content["added_tokens"], vocabulary, eot_token)
        self.eot_id: int = vocabulary[self.eot_token]
        self.bos_id: int = self.eot_id if bos_token is None else vocabulary.get(bos_token, self.eot_id)
        """The token that replaces an empty prompt; end-of-text if the tokenizer has no BOS token."""
        self.fingerprint = _fingerprint(content, vocabulary, self.eot_token)
        self._fast = fast_encoder(pipeline, content)
        self._spelled = _spelled(pipeline, content)

    @classmethod
    def from_json(cls, text: str, eot_token: str | None = None, bos_token: str | None = None) -> Tokenizer:
        """The tokenizer that the text of a `tokenizer.json` describes."""
        return cls(_parsed(text), eot_token, bos_token)

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

    def encode_prompt(self, text: str, *, parse_special: bool = True, add_special_tokens: bool = True) -> EncodedPrompt:
        """The ids of a raw prompt, as transformers' `tokenizer(text)` gives them.

        `parse_special=False` reads special tokens in the text as plain text; `add_special_tokens=False` leaves out what
        the tokenizer's file adds around every text (such as a BOS token). Thread-safe.
        """
        [encoded] = self.encode_prompts([text], parse_special=parse_special, add_special_tokens=add_special_tokens)
        return encoded

    def encode_prompts(
        self, texts: Sequence[str], *, parse_special: bool = True, add_special_tokens: bool = True
    ) -> list[EncodedPrompt]:
        """`encode_prompt` of several texts, in parallel."""
        # Separate copies: whether to parse is a property of a pipeline, which threads share.
        pipeline = self._parsing_pipeline if parse_special else self._literal_pipeline
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"half a surrogate pair at character {error.start} of {text[:40]!r}: give valid Unicode"
                ) from error
        with _one_line_errors("the tokenizer cannot encode this text"):
            # A batch even for one text: unlike `encode`, it releases the GIL.
            encoded = pipeline.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [self._prompt(each, parse_special) for each in encoded]

    def _prompt(self, encoding: Encoding, parse_special: bool) -> EncodedPrompt:
        starts = [start for start, _ in encoding.offsets]
        if parse_special or not self._spelled:
            return EncodedPrompt(encoding.ids, starts)
        rows = [
            (index, start)
            for found, start, added in zip(encoding.ids, starts, encoding.special_tokens_mask, strict=True)
            for index in ((found,) if added else self._spelled.get(found, (found,)))
        ]
        return EncodedPrompt([index for index, _ in rows], [start for _, start in rows])

    @functools.cached_property
    def _parsing_pipeline(self) -> Pipeline:
        return _prompt_pipeline(self.to_json(), parse_special=True)

    @functools.cached_property
    def _literal_pipeline(self) -> Pipeline:
        return _prompt_pipeline(self.to_json(), parse_special=False)

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
        with _one_line_errors("the tokenizer cannot decode these ids"):
            return str(self.pipeline.decode(numbers, skip_special_tokens=False))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which `transformers.AutoTokenizer` opens."""
        settings = {
            "bos_token": self.eot_token,  # what opens the documents that models are trained on here
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
            with _one_line_errors("the tokenizer cannot encode this text"):
                [encoding] = self.pipeline.encode_batch_fast([text], add_special_tokens=False)
        except UnicodeEncodeError as error:
            raise DataError(
                f"text holds half a surrogate pair at character {error.start}: give valid Unicode"
            ) from error
        ids = [index for found in encoding.ids for index in self._spelled.get(found, (found,))]
        return np.array(ids, dtype=np.uint32)


def load_tokenizer(path_or_name: str | os.PathLike[str] = "gpt2") -> Tokenizer:
    """The tokenizer `gpt2`, a `tokenizer.json`, or a directory that holds one (a model, a run's checkpoint)."""
    if str(path_or_name) == "gpt2":
        return _gpt2()
    path = Path(path_or_name)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"no tokenizer at {path}: give 'gpt2', a {TOKENIZER_FILE}, or a directory that holds one")
    try:
        pipeline = _parsed(file.read_text(encoding="utf-8"))
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a Hugging Face {TOKENIZER_FILE}: {error}") from error
    eos_token, bos_token = _named_tokens(file.with_name(SETTINGS_FILE))
    try:
        return Tokenizer(pipeline, eos_token, bos_token)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


@functools.cache
def _gpt2() -> Tokenizer:
    return Tokenizer(gpt2_pipeline(), END_OF_TEXT)


@contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Turn whatever the tokenizers library raises into a DataError.

    It raises bare `Exception`, and where its Rust code panics a `PanicException`, which is not an `Exception`.
    """
    try:
        yield
    except (DataError, UnicodeError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {' '.join(str(error).split())[:300]}") from error


def _spelled(pipeline: Pipeline, content: dict[str, Any]) -> dict[int, tuple[int, ...]]:
    """For special tokens that the model itself finds in plain text: the ids of their first character and the rest.

    Unigram and word-level models match any piece of their vocabulary, and often list special tokens among them.
    """
    spelled = {}
    for token in content["added_tokens"]:
        text = token["content"]
        with _one_line_errors("the tokenizer cannot encode its own tokens"):
            if not token["special"] or [found.id for found in _tokenized(pipeline, text)] != [token["id"]]:
                continue
            parts = [found.id for part in (text[:1], text[1:]) if part for found in _tokenized(pipeline, part)]
        spelled[token["id"]] = tuple(index for index in parts if index != token["id"])
    return spelled


def _tokenized(pipeline: Pipeline, text: str) -> list[Any]:
    try:
        return list(pipeline.model.tokenize(text)) if text else []
    except Exception:  # word-level models raise it for a word that they do not know: it is not found in plain text
        return []


def _prompt_pipeline(text: str, *, parse_special: bool) -> Pipeline:
    content = json.loads(text)
    _keep_spaces_in_offsets(content["post_processor"])
    pipeline = Pipeline.from_str(json.dumps(content))
    pipeline.encode_special_tokens = not parse_special
    return pipeline


def _keep_spaces_in_offsets(processor: dict[str, Any] | None) -> None:
    """Let offsets cover the whole token: byte-level processors may trim its spaces."""
    if processor is None:
        return
    if "trim_offsets" in processor:
        processor["trim_offsets"] = False
    for part in processor.get("processors", ()):
        _keep_spaces_in_offsets(part)


def _parsed(text: str) -> Pipeline:
    """The pipeline that the text of a `tokenizer.json` describes."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"expected JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"expected a JSON object, got a {type(content).__name__}")
    # Before the library sees them: it allocates for every id up to the largest.
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    if isinstance(added, list):
        ids |= {str(token.get("content")): token.get("id") for token in added if isinstance(token, dict)}
    _check_ids({token: index for token, index in ids.items() if isinstance(index, int)})
    with _one_line_errors("the library refuses it"):
        return Pipeline.from_str(text)


def _check_ids(vocabulary: dict[str, int]) -> None:
    largest = max(vocabulary, key=vocabulary.__getitem__, default=None)
    if largest is not None and vocabulary[largest] >= MAX_VOCABULARY:
        raise DataError(
            f"token {largest[:40]!r} has the id {vocabulary[largest]}: expected at most {MAX_VOCABULARY - 1}"
        )


def _named_tokens(file: Path) -> tuple[str | None, str | None]:
    """The eos_token and the bos_token that a model directory's `tokenizer_config.json` names."""
    if not file.is_file():
        return None, None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(settings, dict):
        raise DataError(f"{file} is not a JSON object, but a {type(settings).__name__}")
    return _named_token(file, settings, "eos_token"), _named_token(file, settings, "bos_token")


def _named_token(file: Path, settings: dict[str, Any], name: str) -> str | None:
    named = settings.get(name)
    token = named.get("content", named) if isinstance(named, dict) else named
    if token is not None and not isinstance(token, str):
        raise DataError(f"{file} names the {name} {json.dumps(token)[:80]}: give a token's text or null")
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
