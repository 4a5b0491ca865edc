"""The served model with its tokenizer, chat template and sampling defaults; encodes prompts and conversations."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from whimbrel.base.errors import ConfigError
from whimbrel.inference import Detokenizer, PromptLimits, encode_prompt, fit_messages
from whimbrel.inference.adapters import open_adapter
from whimbrel.model_io import Adapter, ModelLocation, ModelSource, locate_model, open_model
from whimbrel.model_io.adapter import ADAPTER_CONFIG
from whimbrel.models import GPT
from whimbrel.precision import QuantizedWeight
from whimbrel.server.errors import ApiError, preview
from whimbrel.tokenization import Tokenizer
from whimbrel.tokenization.chat_template import DEFAULT_CHAT_TEMPLATE, ChatTemplate
from whimbrel.tokenization.tokenizer import CHARACTERS_PER_TOKEN

__all__ = ["Prompt", "ServedModel", "TokenTexts", "load_served_model", "open_served_adapters"]

TOO_LONG = "context_length_exceeded"
"""Error code of a prompt that is too long."""

START_OF_WORD = re.compile(r"(?<=\s)\S")
MAX_WORD = 64
"""A truncated text starts with the start of a word if there is one within this number of characters."""

MAX_COMPOSED = 4
"""Maximum number of characters that Unicode normalization composes into one. Ordinary text never needs more."""


class TokenTexts:
    """Bytes and text of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # The context of one token keeps the leading space that some tokenizers drop at the start of a text.
        detokenizer = Detokenizer(tokenizer, [tokenizer.eot_id], keep_special=True)
        self.to_bytes = functools.lru_cache(maxsize=None)(detokenizer.token_bytes)  # bounded by the vocabulary
        self.max_bytes = max(map(len, map(self.to_bytes, set(tokenizer.pipeline.get_vocab().values()))))
        """Length of the longest token in bytes."""
        normalizes = tokenizer.pipeline.normalizer is not None
        self.max_characters = self.max_bytes * (MAX_COMPOSED if normalizes else 1)
        """Maximum number of prompt characters per token."""

    def to_text(self, token: int) -> str:
        r"""The token's text, or `bytes:\xe2\x80` if it is not valid UTF-8 by itself."""
        data = self.to_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt with its text."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[int, ...] | None = None
    """Character offset at which each token starts in the text; None if the text was decoded from the ids."""
    dropped: int = 0
    """Number of messages, characters or token ids that were dropped from its beginning to fit the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model or one of its adapters, and everything that converts between text and its tokens."""

    model: GPT
    tokenizer: Tokenizer
    name: str
    """The model id in the API."""
    adapter: str | None = None
    """The name of the adapter in the engine; None for the base model."""
    created: int = 0
    """Unix time at which the model was written."""
    chat_template: ChatTemplate = DEFAULT_CHAT_TEMPLATE
    """Converts conversations to text."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a completion."""
    bos_id: int | None = None
    """The token that replaces an empty prompt. (default: the tokenizer's BOS token)"""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters for requests that do not set them."""
    max_new_tokens: int | None = None
    """The model's own default, which the chat page uses."""
    token_texts: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_texts", TokenTexts(self.tokenizer))

    @property
    def dtype(self) -> str:
        """Data type of the weights, or the format they are quantized to."""
        weights = list(self.model.parameters())
        quantized = next((weight for weight in weights if isinstance(weight, QuantizedWeight)), None)
        return quantized.format.name if quantized is not None else str(weights[0].dtype).removeprefix("torch.")

    @property
    def generation_config(self) -> dict[str, Any]:
        """The model's defaults: the sampling parameters that it sets, and `max_new_tokens`."""
        fields = {**self.default_sampling, "max_new_tokens": self.max_new_tokens}
        return {name: value for name, value in fields.items() if value is not None}

    def encode_prompts(
        self,
        prompts: Sequence[str | list[int]],
        max_tokens: int,
        parse_special: bool = True,
        truncate_to: PromptLimits | None = None,
    ) -> list[Prompt]:
        """Encode the prompts of a completion; ApiError if one has more than `max_tokens`. Slow: run it in a thread.

        With `truncate_to`, only the end of a prompt over these limits is encoded. Raises RequestError if a text is not
        valid Unicode.
        """
        return [self._encode_prompt(prompt, max_tokens, parse_special, truncate_to) for prompt in prompts]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        truncate_to: PromptLimits | None = None,
    ) -> Prompt:
        """Encode a conversation; ApiError if it has more than `max_tokens`. Slow: run it in a thread.

        With `truncate_to`, the oldest messages of a conversation over these limits are dropped, but not the last
        message of the user.
        """
        if truncate_to is None:
            return self._encode_messages(messages, max_tokens, tools)

        def encode(kept: Sequence[Mapping[str, Any]], limit: int) -> Prompt | None:
            return _unless_too_long(lambda: self._encode_messages(kept, limit, tools))

        dropped, prompt = fit_messages(messages, encode, truncate_to)
        if prompt is None:
            return self._encode_messages(messages, max_tokens, tools)  # raises the error
        return replace(prompt, dropped=dropped)

    def _encode_messages(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int, tools: Sequence[Mapping[str, Any]] | None
    ) -> Prompt:
        self._check_characters(sum(len(message["content"]) for message in messages), "messages", max_tokens)
        ids = self.chat_template.encode(self.tokenizer, messages, tools=tools, max_tokens=max_tokens)
        _check_length(ids, "messages", max_tokens)
        return Prompt("", tuple(ids))

    def _encode_prompt(
        self, prompt: str | list[int], max_tokens: int, parse_special: bool, truncate_to: PromptLimits | None
    ) -> Prompt:
        if isinstance(prompt, list):
            if truncate_to is None or len(prompt) <= truncate_to.complete:
                return self._prompt_from_ids(prompt, max_tokens)
            dropped = len(prompt) - truncate_to.truncated
            return replace(self._prompt_from_ids(prompt[dropped:], max_tokens), dropped=dropped)
        if truncate_to is None:
            return self._encode_text(prompt, max_tokens, parse_special)
        complete = _unless_too_long(lambda: self._encode_text(prompt, truncate_to.complete, parse_special))
        return complete or self._encode_end(prompt, truncate_to.truncated, parse_special)

    def _encode_end(self, text: str, max_tokens: int, parse_special: bool) -> Prompt:
        """Encode the end of a text that has more than `max_tokens`, if possible from the start of a word."""
        size = CHARACTERS_PER_TOKEN * max_tokens
        while True:
            end = text[-size:]
            ids, offsets = encode_prompt(self.tokenizer, end, parse_special=parse_special, bos_id=self.bos_id)
            if len(ids) > max_tokens or size >= len(text):
                break
            size *= 2  # of long tokens
        while len(ids) > max_tokens:
            start = max(offsets[len(ids) - max_tokens], 1)
            word = START_OF_WORD.search(end, start, start + MAX_WORD)
            end = end[word.start() if word else start :]
            if not end:
                raise _too_long("more", "the last character of prompt", max_tokens)
            ids, offsets = encode_prompt(self.tokenizer, end, parse_special=parse_special, bos_id=self.bos_id)
        return Prompt(end, tuple(ids), tuple(offsets), dropped=len(text) - len(end))

    def _encode_text(self, text: str, max_tokens: int, parse_special: bool) -> Prompt:
        self._check_characters(len(text), "prompt", max_tokens)
        ids, offsets = encode_prompt(
            self.tokenizer, text, parse_special=parse_special, bos_id=self.bos_id, max_tokens=max_tokens
        )
        _check_length(ids, "prompt", max_tokens)
        return Prompt(text, tuple(ids), tuple(offsets))

    def _prompt_from_ids(self, ids: list[int], max_tokens: int) -> Prompt:
        if len(ids) > max_tokens:
            raise _too_long(f"{len(ids)} tokens", "prompt", max_tokens)
        vocab_size = self.model.config.vocab_size
        invalid = next((token for token in ids if not 0 <= token < vocab_size), None)
        if invalid is not None:
            raise ApiError(
                400,
                f"expected token ids from 0 to {vocab_size - 1} in prompt, got {preview(invalid)}",
                param="prompt",
                code="invalid_value",
            )
        # The model's vocabulary may be padded beyond the tokenizer's.
        text = self.tokenizer.decode([token for token in ids if token < self.tokenizer.vocab_size])
        return Prompt(text, tuple(ids))

    def _check_characters(self, characters: int, param: str, max_tokens: int) -> None:
        """Before tokenizing, reject a text that is certainly too long."""
        if characters > max_tokens * self.token_texts.max_characters:
            raise _too_long(f"{characters} characters", param, max_tokens)


def _unless_too_long(encode: Callable[[], Prompt]) -> Prompt | None:
    """The result of `encode`, or None if it raises the error of a prompt that is too long."""
    try:
        return encode()
    except ApiError as error:
        if error.code != TOO_LONG:
            raise
        return None


def _check_length(ids: Sequence[int], param: str, max_tokens: int) -> None:
    if len(ids) > max_tokens:  # the exact number is unknown: encoding may have stopped early
        raise _too_long(f"more than {max_tokens} tokens", param, max_tokens)


def _too_long(length: str, param: str, max_tokens: int) -> ApiError:
    message = f"{param} has {length}: the maximum prompt length is {max_tokens} tokens"
    return ApiError(400, message, param=param, code=TOO_LONG)


def load_served_model(
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    name: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    device: torch.device | None = None,
    quantize: str | None = None,
) -> ServedModel:
    """Load a run's newest checkpoint, a model or adapter directory or a llama2.c file for serving.

    `name` defaults to the name of the directory; `quantize` is the weight format to quantize to while loading.
    """
    source = open_model(path, tokenizer, base=base)
    template = source.chat_template()  # errors appear before the weights are loaded
    model = source.load_model(device=device, quantize=quantize)
    return _served_model(source, model, name or Path(path).absolute().name, None, template)


def open_served_adapters(
    model: ServedModel, path: str | os.PathLike[str], adapters: Mapping[str, str | os.PathLike[str]], **options: Any
) -> tuple[list[ServedModel], dict[str, Adapter]]:
    """Read adapters of the model at `path`, by name; returns them for the server and for the engine.

    `options` are those of `locate_model` for the model.
    """
    if model.name in adapters:
        raise ConfigError(f"--adapter {model.name}: the model already has this name; choose another")
    served, opened, location = [], {}, locate_model(path, **options)
    for name, adapter in adapters.items():
        opened[name], source = open_adapter(name, adapter, model.model, location, model.tokenizer)
        assert source is not None
        served.append(_served_model(source, model.model, name, name, source.chat_template()))
    return served, opened


def _served_model(
    source: ModelSource, model: GPT, name: str, adapter: str | None, template: ChatTemplate | None
) -> ServedModel:
    return ServedModel(
        model=model,
        tokenizer=source.tokenizer,
        name=name,
        adapter=adapter,
        created=_modified(source.location),
        chat_template=template or DEFAULT_CHAT_TEMPLATE,
        eos_ids=frozenset(source.generation_config.eos_token_ids),
        bos_id=source.generation_config.bos_token_id,
        default_sampling=source.generation_config.sampling,
        max_new_tokens=source.generation_config.max_new_tokens,
    )


def _modified(location: ModelLocation) -> int:
    """Unix time at which the model was written."""
    path = location.directory
    file = path if path.is_file() else path / (ADAPTER_CONFIG if location.is_adapter else "config.json")
    return int(file.stat().st_mtime)
