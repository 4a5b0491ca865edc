"""`Tokenizer`: loads any Hugging Face `tokenizer.json`; uses `tiktoken` to encode where it produces the same ids."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Pipeline

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.base.files import atomic_file
from whimbrel.tokenization.bpe import END_OF_TEXT, MAX_VOCAB_SIZE, gpt2_pipeline, tiktoken_encoder, train_bpe

__all__ = [
    "EncodedPrompt",
    "EncodedText",
    "Tokenizer",
    "load_tokenizer",
    "read_json_object",
    "read_special_tokens",
    "train_tokenizer",
]

TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
END_OF_TEXT_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>", "<s>")
"""Candidates for the end-of-text token if tokenizer_config.json does not set one, in order of preference."""

IGNORED_BY_FINGERPRINT = ("decoder", "padding", "post_processor", "truncation", "version")
"""Parts of a tokenizer file that do not affect the ids of a document."""

CHARACTERS_PER_TOKEN = 16
"""Upper bound for ordinary text, which has about 4. Text with more is still encoded correctly, just in two passes."""
MARGIN_TOKENS = 256
"""Safety margin: cutting a text in the middle of a word can add tokens."""


class EncodedPrompt(NamedTuple):
    """A prompt as token ids."""

    ids: list[int]
    offsets: list[int]
    """Character offset at which each token starts."""


class EncodedText(NamedTuple):
    """A text as token ids, with the part of the text that each token covers."""

    ids: NDArray[np.int64]
    spans: NDArray[np.int64]
    """(tokens, 2): start and end of each token in characters; both 0 for a token that the post-processor added."""


class Tokenizer:
    """Converts between text and token ids.

    `encode` and `encode_documents` treat special tokens in a text as plain text, so that a document cannot contain the
    end-of-text token. `encode_prompt` parses them, as transformers, vLLM and llama.cpp do.
    """

    def __init__(self, pipeline: Pipeline, eot_token: str | None = None, bos_token: str | None = None) -> None:
        with _library_errors("the tokenizer cannot be used"):
            pipeline.no_padding()
            pipeline.no_truncation()
            pipeline.encode_special_tokens = True
            vocabulary = pipeline.get_vocab(with_added_tokens=True)
            _check_ids(vocabulary)
            content: dict[str, Any] = json.loads(pipeline.to_str())
            pipeline.encode("")  # some broken post-processors only fail when they run
        self.pipeline = pipeline
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.eot_token = _end_of_text_token(content["added_tokens"], vocabulary, eot_token)
        self.eot_id: int = vocabulary[self.eot_token]
        """The end-of-text token, which starts every document."""
        self.bos_token = bos_token if bos_token in vocabulary else None
        self.bos_id: int = self.eot_id if bos_token is None else vocabulary.get(bos_token, self.eot_id)
        """The token that replaces an empty prompt; end-of-text if the tokenizer has no BOS token."""
        self.fingerprint = _fingerprint(content, vocabulary, self.eot_token)
        self._tiktoken = tiktoken_encoder(pipeline, content)
        self._plain_ids = _plain_ids_of_special_tokens(pipeline, content)

    @classmethod
    def from_json(cls, text: str, eot_token: str | None = None, bos_token: str | None = None) -> Tokenizer:
        """Create a tokenizer from the text of a `tokenizer.json`."""
        return cls(_parse_pipeline(text), eot_token, bos_token)

    def to_json(self) -> str:
        """The text of this tokenizer's `tokenizer.json`."""
        return str(self.pipeline.to_str())

    def with_special_tokens(self, tokens: Sequence[str], *, eot_token: str | None = None) -> Tokenizer:
        """A copy in which `tokens` are special tokens, and optionally another token is the end-of-text token.

        A token of the vocabulary keeps its id; others get the next free ids, in order. A model needs a row of its
        embedding for each of them (`models.resize_vocabulary`).
        """
        if invalid := [token for token in tokens if not token.strip()]:
            raise ConfigError(f"expected special tokens with visible characters, got {invalid[0]!r}")
        pipeline = _parse_pipeline(self.to_json())
        special = {token.content for token in pipeline.get_added_tokens_decoder().values() if token.special}
        new = [AddedToken(token, special=True, normalized=False) for token in tokens if token not in special]
        with _library_errors("the tokenizer cannot be extended"):
            pipeline.add_special_tokens(new)
        return Tokenizer(pipeline, eot_token or self.eot_token, self.bos_token or self.eot_token)

    @property
    def backend(self) -> str:
        """The library that encodes: `tiktoken` or `tokenizers`."""
        return "tiktoken" if self._tiktoken else "tokenizers"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest shard dtype that can represent all ids."""
        return np.dtype(np.uint16 if self.vocab_size <= 65_535 else np.uint32)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without BOS or other added tokens; special tokens in the text are plain text."""
        ids: list[int] = self._encode(text).tolist()
        return ids

    def encode_prompt(
        self,
        text: str,
        *,
        parse_special: bool = True,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> EncodedPrompt:
        """Token ids of a raw prompt, the same as from transformers' `tokenizer(text)`.

        `parse_special=False` treats special tokens in the text as plain text; `add_special_tokens=False` omits the
        tokens that the tokenizer's post-processor adds to every text (such as BOS). If the text is far longer than
        `max_tokens`, only a prefix that already exceeds the limit is encoded: encoding takes up to a thousand times the
        memory of the text, and the caller rejects it anyway. Thread-safe.
        """
        encode = functools.partial(
            self.encode_prompts, parse_special=parse_special, add_special_tokens=add_special_tokens
        )
        if max_tokens is not None and len(text) > CHARACTERS_PER_TOKEN * max(1, max_tokens):
            [prefix] = encode([text[: CHARACTERS_PER_TOKEN * max(1, max_tokens)]])
            if len(prefix.ids) > max_tokens + MARGIN_TOKENS:
                return prefix
        [encoded] = encode([text])
        return encoded

    def encode_prompts(
        self, texts: Sequence[str], *, parse_special: bool = True, add_special_tokens: bool = True
    ) -> list[EncodedPrompt]:
        """`encode_prompt` for several texts, in parallel."""
        encodings = self._encode_batch(texts, parse_special, add_special_tokens)
        return [self._to_prompt(encoding, parse_special) for encoding in encodings]

    def encode_with_spans(
        self, texts: Sequence[str], *, parse_special: bool = True, add_special_tokens: bool = True
    ) -> list[EncodedText]:
        """`encode_prompts` as arrays, with the span of every token."""
        encoded = []
        for encoding in self._encode_batch(texts, parse_special, add_special_tokens):
            ids = np.array(encoding.ids, dtype=np.int64)
            spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            if not parse_special and self._plain_ids:
                parts = self._plain_parts(encoding)
                ids = np.array([token for part in parts for token in part], dtype=np.int64)
                spans = spans.repeat([len(part) for part in parts], axis=0)
            encoded.append(EncodedText(ids, spans))
        return encoded

    def _encode_batch(self, texts: Sequence[str], parse_special: bool, add_special_tokens: bool) -> list[Encoding]:
        # Separate copies, because whether to parse is a property of a pipeline, which threads share.
        pipeline = self._parsing_pipeline if parse_special else self._literal_pipeline
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"expected valid Unicode, got a lone surrogate at character {error.start} of {text[:40]!r}"
                ) from error
        with _library_errors("the tokenizer cannot encode this text"):
            # A batch even for one text: unlike `encode`, it releases the GIL.
            encodings: list[Encoding] = pipeline.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return encodings

    def _to_prompt(self, encoding: Encoding, parse_special: bool) -> EncodedPrompt:
        starts = [start for start, _ in encoding.offsets]
        if parse_special or not self._plain_ids:
            return EncodedPrompt(encoding.ids, starts)
        parts = self._plain_parts(encoding)
        return EncodedPrompt(
            [token_id for part in parts for token_id in part],
            [start for part, start in zip(parts, starts, strict=True) for _ in part],
        )

    def _plain_parts(self, encoding: Encoding) -> list[tuple[int, ...]]:
        """The ids that replace each token of a literal encoding, so that no special token is left in it."""
        return [
            (token,) if added else self._plain_ids.get(token, (token,))
            for token, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        ]

    @functools.cached_property
    def _parsing_pipeline(self) -> Pipeline:
        return _prompt_pipeline(self.to_json(), parse_special=True)

    @functools.cached_property
    def _literal_pipeline(self) -> Pipeline:
        return _prompt_pipeline(self.to_json(), parse_special=False)

    def encode_documents(self, texts: Iterable[str]) -> list[NDArray[Any]]:
        """Token ids of each text as an array of `dtype` that starts with the end-of-text token. Thread-safe."""
        eot = np.array([self.eot_id], dtype=self.dtype)
        return [np.concatenate((eot, self._encode(text)), dtype=self.dtype, casting="same_kind") for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of `ids`, special tokens included; incomplete UTF-8 sequences become U+FFFD."""
        token_ids = [int(token_id) for token_id in ids]
        invalid = next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)
        if invalid is not None:
            raise DataError(f"expected token ids from 0 to {self.vocab_size - 1}, got {invalid}")
        with _library_errors("the tokenizer cannot decode these ids"):
            return str(self.pipeline.decode(token_ids, skip_special_tokens=False))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, for `transformers.AutoTokenizer`."""
        settings = {
            "bos_token": self.bos_token or self.eot_token,  # end-of-text starts the documents of pretraining
            "clean_up_tokenization_spaces": False,
            "eos_token": self.eot_token,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        with atomic_file(Path(directory) / TOKENIZER_CONFIG_FILE, "w") as file:
            file.write(json.dumps(settings, indent=2) + "\n")
        with atomic_file(Path(directory) / TOKENIZER_FILE, "w") as file:  # last: if it exists, both do
            file.write(self.to_json())

    def _encode(self, text: str) -> NDArray[Any]:
        try:
            if self._tiktoken:
                return self._tiktoken.encode_to_numpy(text, disallowed_special=())
            text.encode()  # raises UnicodeEncodeError like tiktoken does
            with _library_errors("the tokenizer cannot encode this text"):
                [encoding] = self.pipeline.encode_batch_fast([text], add_special_tokens=False)
        except UnicodeEncodeError as error:
            raise DataError(f"expected valid Unicode, got a lone surrogate at character {error.start}") from error
        ids = [token_id for token in encoding.ids for token_id in self._plain_ids.get(token, (token,))]
        return np.array(ids, dtype=np.uint32)


def load_tokenizer(path_or_name: str | os.PathLike[str] = "gpt2") -> Tokenizer:
    """Load `gpt2`, a `tokenizer.json` file, or the tokenizer of a directory (a model or a checkpoint's model)."""
    if str(path_or_name) == "gpt2":
        return _gpt2()
    path = Path(path_or_name)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"no tokenizer at {path}: expected 'gpt2', a {TOKENIZER_FILE}, or a directory with one")
    try:
        pipeline = _parse_pipeline(file.read_text(encoding="utf-8"))
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a Hugging Face {TOKENIZER_FILE}: {error}") from error
    tokens = _read_token_strings(file.with_name(TOKENIZER_CONFIG_FILE), ("bos_token", "eos_token"))
    try:
        return Tokenizer(pipeline, tokens.get("eos_token"), tokens.get("bos_token"))
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


@functools.cache
def _gpt2() -> Tokenizer:
    return Tokenizer(gpt2_pipeline(), END_OF_TEXT)


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2) -> Tokenizer:
    """Train a byte-level BPE tokenizer on `texts`.

    Logs a warning and returns fewer than `vocab_size` tokens if too few pairs occur `min_frequency` times.
    """
    tokenizer = Tokenizer(train_bpe(texts, vocab_size, min_frequency), END_OF_TEXT)
    if tokenizer.vocab_size < vocab_size:
        logging.getLogger(__name__).warning(
            "trained %d of the requested %d tokens: too few pairs occur at least min_frequency times",
            tokenizer.vocab_size,
            vocab_size,
        )
    return tokenizer


@contextmanager
def _library_errors(message: str) -> Iterator[None]:
    """Convert whatever the tokenizers library raises to a one-line DataError.

    It raises bare `Exception`, and where its Rust code panics a `PanicException`, which is not an `Exception`.
    """
    try:
        yield
    except (DataError, UnicodeError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{message}: {' '.join(str(error).split())[:300]}") from error


def _plain_ids_of_special_tokens(pipeline: Pipeline, content: dict[str, Any]) -> dict[int, tuple[int, ...]]:
    """For special tokens that the model matches in plain text: the ids of their first character and of the rest.

    Unigram and word-level models match any entry of their vocabulary, which often includes special tokens.
    """
    plain_ids = {}
    for token in content["added_tokens"]:
        text = token["content"]
        with _library_errors("the tokenizer cannot encode its own tokens"):
            if not token["special"] or _model_ids(pipeline, text) != [token["id"]]:
                continue
            ids = [token_id for part in (text[:1], text[1:]) for token_id in _model_ids(pipeline, part)]
        plain_ids[token["id"]] = tuple(token_id for token_id in ids if token_id != token["id"])
    return plain_ids


def _model_ids(pipeline: Pipeline, text: str) -> list[int]:
    try:
        return [token.id for token in pipeline.model.tokenize(text)] if text else []
    except Exception:  # word-level models raise it for an unknown word
        return []


def _prompt_pipeline(text: str, *, parse_special: bool) -> Pipeline:
    content = json.loads(text)
    _disable_trim_offsets(content["post_processor"])
    pipeline = Pipeline.from_str(json.dumps(content))
    pipeline.encode_special_tokens = not parse_special
    return pipeline


def _disable_trim_offsets(processor: dict[str, Any] | None) -> None:
    """Make offsets cover complete tokens: byte-level post-processors may exclude their spaces."""
    if processor is None:
        return
    if "trim_offsets" in processor:
        processor["trim_offsets"] = False
    for part in processor.get("processors", ()):
        _disable_trim_offsets(part)


def _parse_pipeline(text: str) -> Pipeline:
    """Parse the text of a `tokenizer.json`."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"expected JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"expected a JSON object, got a {type(content).__name__}")
    # Check ids before the library sees them: it allocates for every id up to the largest.
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    if isinstance(added, list):
        ids |= {str(token.get("content")): token.get("id") for token in added if isinstance(token, dict)}
    _check_ids({token: token_id for token, token_id in ids.items() if isinstance(token_id, int)})
    with _library_errors("the tokenizers library cannot parse it"):
        return Pipeline.from_str(text)


def _check_ids(vocabulary: dict[str, int]) -> None:
    largest = max(vocabulary, key=vocabulary.__getitem__, default=None)
    if largest is not None and vocabulary[largest] >= MAX_VOCAB_SIZE:
        raise DataError(
            f"expected token ids of at most {MAX_VOCAB_SIZE - 1}, got {vocabulary[largest]} for {largest[:40]!r}"
        )


def read_special_tokens(directory: str | os.PathLike[str]) -> dict[str, str]:
    """The text of `bos_token`, `eos_token` etc. in a model directory."""
    files = (Path(directory) / SPECIAL_TOKENS_FILE, Path(directory) / TOKENIZER_CONFIG_FILE)
    return {name: text for file in files for name, text in _read_token_strings(file, SPECIAL_TOKENS).items()}


def _read_token_strings(file: Path, names: Sequence[str]) -> dict[str, str]:
    settings, tokens = read_json_object(file), {}
    for name in names:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(text, str):
            raise DataError(f"{file}: expected {name} to be a token's text or null, got {json.dumps(value)[:80]}")
        if text:
            tokens[name] = text
    return tokens


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{file}: expected a JSON object, got a {type(value).__name__}")
    return value


def _end_of_text_token(added: list[dict[str, Any]], vocabulary: dict[str, int], name: str | None) -> str:
    """The end-of-text token: `name`, or the first candidate. It must be special, so that encoded text never has it."""
    special = {token["content"] for token in added if token["special"]}
    for token in END_OF_TEXT_TOKENS if name is None else (name,):
        if token in special:
            return token
    if name in vocabulary:
        available = ", ".join(sorted(special)) or "none"
        raise DataError(f"expected the end-of-text token '{name}' to be a special token (available: {available})")
    candidates = " or ".join(END_OF_TEXT_TOKENS) if name is None else name
    raise DataError(f"the tokenizer has no end-of-text token ({candidates}): add it as a special token")


def _fingerprint(content: dict[str, Any], vocabulary: dict[str, int], eot_token: str) -> str:
    """A hash of everything that affects ids: equal whether or not special tokens are in the model's own vocabulary."""
    hashed = {key: value for key, value in content.items() if key not in IGNORED_BY_FINGERPRINT}
    hashed["model"] = content["model"] | {"vocab": vocabulary}
    hashed["eot_id"] = vocabulary[eot_token]
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()
