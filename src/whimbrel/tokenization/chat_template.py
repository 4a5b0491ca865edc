"""Chat templates: from messages to the prompt format that a model was trained on.

A template is a Jinja program that comes with a model, with the interface of transformers. It runs in a sandbox with
limits (`template_sandbox`); a template that fails or exceeds a limit raises RequestError.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whimbrel.base.errors import ConfigError, DataError, RequestError
from whimbrel.tokenization.template_sandbox import (
    InvalidTemplateError,
    LimitExceededError,
    Markers,
    RenderError,
    compile_in_process,
    map_strings,
    render_in_process,
    sandbox,
)
from whimbrel.tokenization.tokenizer import TOKENIZER_CONFIG_FILE, Tokenizer, read_json_object, read_special_tokens

__all__ = [
    "DEFAULT_CHAT_TEMPLATE",
    "ChatTemplate",
    "Message",
    "load_chat_template",
    "read_template",
]

Message = Mapping[str, Any]
"""A message of a conversation: `role` (system, user, assistant), `content`, and any other fields a template uses."""

TEMPLATE_FILE, TEMPLATE_DIRECTORY = "chat_template.jinja", "additional_chat_templates"

SURROGATES = range(0xD800, 0xE000)
"""Code points that never occur in valid text; used as markers."""

MAX_DEPTH = 64
"""Maximum nesting depth of messages."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        stop_strings: Sequence[str] = (),
        writes_bos: bool = True,
        trusted: bool = False,
    ) -> None:
        """Compile `source`; DataError if it is not valid Jinja or exceeds a limit.

        `stop_strings` end a response in addition to the end-of-text token. If the template does not write
        the BOS token itself (`writes_bos=False`), the tokenizer adds it. A `trusted` template runs in this process
        without limits: only for those that come with this package.
        """
        self._trusted = trusted
        self.source, self.stop_strings, self.writes_bos = source, tuple(stop_strings), writes_bos
        self.special_tokens = dict(special_tokens or {})
        try:
            (compile_in_process if trusted else sandbox.compile)(source)
        except InvalidTemplateError as error:
            raise DataError(f"the chat template is not valid Jinja {error}") from error
        except LimitExceededError as error:
            raise DataError(f"the chat template takes more than {error} to compile: change it") from error

    def check(self) -> None:
        """Render one short message; DataError if that exceeds a limit, a warning if the template rejects it."""
        try:
            self._render([{"role": "user", "content": "Hello"}], add_generation_prompt=True, markers=None)
        except LimitExceededError as error:
            raise DataError(f"the chat template takes more than {error} for one short message: change it") from error
        except RenderError as error:
            logging.getLogger(__name__).warning("the chat template rejects a single user message: %r", str(error))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, by default up to the start of the assistant's response."""
        _check_messages(messages)
        return self._render_or_raise(_map_strings(messages, str), add_generation_prompt, None)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation; if it has more than `max_tokens`, encoding stops once that is certain.

        Only special tokens that the template itself writes become special ids. Any that contains a character of a
        message is encoded as plain text, whatever the template did to the message, so that messages cannot end their
        turn or impersonate another role.

        Implementation: in messages, the characters of special tokens are replaced by markers before the template runs
        (see `_SpecialTokens`). Afterwards the original characters are restored, and a special token in the text is
        genuine only if there was no marker at its position.
        """
        _check_messages(messages)
        special = _special_tokens(tokenizer)
        to_character = special.markers.to_character
        try:
            valid = _map_strings(messages, _check_unicode)
            marked = self._render_or_raise(valid, add_generation_prompt, special.markers)
            text = marked.translate(to_character)
            text.encode()
        except UnicodeEncodeError as error:
            raise _request_error("expected messages of valid Unicode, got a lone surrogate") from error
        spans = [match.span() for match in special.pattern.finditer(text)]
        forged = [(start, end) for start, end in spans if to_character.keys() & set(map(ord, marked[start:end]))]
        ids: list[int] = []
        # Boundaries of segments that alternate between ordinary text (even) and forged special tokens (odd).
        for segment, (start, end) in enumerate(itertools.pairwise((0, *itertools.chain(*forged), len(text)))):
            if max_tokens is not None and len(ids) > max_tokens:
                break
            if segment % 2:
                ids += tokenizer.encode(text[start:end])
            else:
                add_bos = segment == 0 and not self.writes_bos
                ids += tokenizer.encode_prompt(text[start:end], add_special_tokens=add_bos, max_tokens=max_tokens).ids
        return ids

    def _render_or_raise(self, messages: Any, add_generation_prompt: bool, markers: Markers | None) -> str:
        try:
            return self._render(messages, add_generation_prompt, markers)
        except RenderError as error:
            reason = str(error).translate({} if markers is None else markers.to_character)
            raise _request_error(f"the model's chat template rejects these messages: {reason}") from error
        except LimitExceededError as error:
            raise _request_error(f"the model's chat template takes more than {error} for these messages") from error

    def _render(self, messages: Any, add_generation_prompt: bool, markers: Markers | None) -> str:
        variables = {
            **self.special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return (render_in_process if self._trusted else sandbox.render)(self.source, variables, markers)


def load_chat_template(directory: str | Path, name: str = "default") -> ChatTemplate | None:
    """The chat template of a model directory, or one of its other named templates; None if it has no template."""
    directory = Path(directory)
    settings = read_json_object(directory / TOKENIZER_CONFIG_FILE)
    templates = _templates_by_name(settings.get("chat_template"), directory / TOKENIZER_CONFIG_FILE)
    for file in [*directory.glob(f"{TEMPLATE_DIRECTORY}/*.jinja"), *directory.glob(TEMPLATE_FILE)]:
        templates["default" if file.name == TEMPLATE_FILE else file.stem] = read_template(file)
    if name not in templates:
        if name == "default" and not templates:
            return None
        available = ", ".join(sorted(templates)) or "none"
        raise ConfigError(f"{directory} has no chat template '{name}' (available: {available})")
    try:
        template = ChatTemplate(templates[name], read_special_tokens(directory))
        template.check()
        return template
    except DataError as error:
        raise DataError(f"{directory}: {error}") from error


def read_template(file: Path) -> str:
    """The text of a Jinja file."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"expected a Jinja file, got {file}, which is not UTF-8 at byte {error.start}") from error


def _templates_by_name(value: object, file: Path) -> dict[str, str]:
    """The templates of `chat_template` in tokenizer_config.json: one string, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError) as error:
        raise DataError(
            f"{file}: expected chat_template to be a string or a list of objects with name and template"
        ) from error


def _check_messages(messages: Sequence[Any]) -> None:
    if not messages:
        raise _request_error("expected at least one message, with role and content")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _request_error(f"expected message {index} to be an object with role and content, got {message!r}")


def _request_error(message: str) -> RequestError:
    return RequestError(message, field="messages")


class _SpecialTokens(NamedTuple):
    """The special tokens of a tokenizer, and the markers for the characters they consist of.

    Each such character has its own marker, and per token only its punctuation (or first letter) is marked, so that a
    template may slice, reverse and join messages, but no character of a message is taken for one of the template's.
    """

    pattern: re.Pattern[str]
    markers: Markers


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer: Tokenizer) -> _SpecialTokens:
    added = tokenizer.pipeline.get_added_tokens_decoder()
    special = [token.content for token in added.values() if token.special]
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
    # Punctuation such as < | > [ ]. A token that is a plain word is marked by its first letter, in both cases, because
    # a template may change the case.
    characters: set[str] = set()
    for token in special:
        characters.update(re.findall(r"[^\w\s]", token) or token[:1] + token[:1].swapcase())
    to_marker = {
        ord(character): chr(surrogate) for surrogate, character in zip(SURROGATES, sorted(characters), strict=False)
    }
    return _SpecialTokens(
        pattern, Markers(to_marker, {ord(marker): chr(character) for character, marker in to_marker.items()})
    )


def _check_unicode(text: str) -> str:
    """Raise UnicodeEncodeError for a lone surrogate, which would be mistaken for a marker."""
    text.encode()
    return text


def _map_strings(messages: Sequence[Message], function: Callable[[str], str]) -> Any:
    try:
        return map_strings(list(messages), function, max_depth=MAX_DEPTH)
    except RecursionError:
        raise _request_error(f"messages: expected fewer than {MAX_DEPTH} levels of nesting") from None


DEFAULT_CHAT_TEMPLATE = ChatTemplate(
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content | trim }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}",
    stop_strings=("\nUser:",),
    writes_bos=False,
    trusted=True,
)
"""For models without a chat template: plain "User:" and "Assistant:" lines."""
