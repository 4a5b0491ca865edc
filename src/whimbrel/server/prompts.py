"""From what a client sent to the tokens to go on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from whimbrel.server.errors import ApiError, shown
from whimbrel.server.tokens import TokenTexts
from whimbrel.tokenization import Tokenizer
from whimbrel.tokenization.chat import ChatTemplate, encode_up_to

__all__ = ["Prompt", "PromptReader"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text and as tokens."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[int, ...] | None = None
    """The character of the text at which each token starts; None where the text was decoded from the ids."""


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Turns texts, token ids and conversations into prompts. It may take its time: not for the event loop."""

    tokenizer: Tokenizer
    texts: TokenTexts
    template: ChatTemplate
    vocab_size: int
    bos_id: int
    """What an empty prompt starts with."""

    def read(self, given: Sequence[str | list[int]], most: int, parse_special: bool = True) -> list[Prompt]:
        """The prompts of a completion, of at most `most` tokens each."""
        return [
            self._text(item, most, parse_special) if isinstance(item, str) else self._ids(item, most) for item in given
        ]

    def converse(self, messages: Sequence[Mapping[str, str]], most: int) -> Prompt:
        """The prompt of a conversation."""
        self._check_size(sum(len(message["content"]) for message in messages), "messages", most)
        ids = self.template.encode(self.tokenizer, messages, max_tokens=most)
        return Prompt("", tuple(_checked_length(ids, "messages", most)))

    def _text(self, text: str, most: int, parse_special: bool) -> Prompt:
        self._check_size(len(text), "prompt", most)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                400,
                f"prompt holds half a surrogate pair at character {error.start}",
                param="prompt",
                code="invalid_value",
            ) from None
        ids, offsets = encode_up_to(partial(self.tokenizer.encode_prompt, parse_special=parse_special), text, most)
        if not ids:
            ids, offsets = [self.bos_id], [0]
        return Prompt(text, tuple(_checked_length(ids, "prompt", most)), tuple(offsets))

    def _ids(self, ids: list[int], most: int) -> Prompt:
        if len(ids) > most:
            raise _too_long(f"{len(ids)} tokens", "prompt", most)
        strange = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if strange is not None:
            raise ApiError(
                400,
                f"prompt holds the token id {shown(strange)}: ids run from 0 to {self.vocab_size - 1}",
                param="prompt",
                code="invalid_value",
            )
        text = self.tokenizer.decode([token for token in ids if token < self.tokenizer.vocab_size])
        return Prompt(text, tuple(ids))

    def _check_size(self, characters: int, param: str, most: int) -> None:
        """Reject a text that is certain to be too long before it is tokenized."""
        if characters > most * self.texts.max_characters:
            raise _too_long(f"{characters} characters", param, most)


def _checked_length(ids: list[int], param: str, most: int) -> list[int]:
    if len(ids) > most:
        raise _too_long(f"more than {most} tokens", param, most)  # the exact number is unknown: encoding stopped early
    return ids


def _too_long(length: str, param: str, most: int) -> ApiError:
    message = f"{param} has {length}: the longest prompt here has {most} tokens"
    return ApiError(400, message, param=param, code="context_length_exceeded")
