"""Chat templates: messages to the text that a model was taught to read them as.

A template is a Jinja program that comes with a model, as `transformers` runs it. It runs in a sandbox and within limits
(`rendering`); whatever goes wrong there refuses the request.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whimbrel.base.errors import ConfigError, DataError, RequestError
from whimbrel.tokenization.rendering import (
    LimitExceededError,
    Marks,
    RefusedError,
    SourceError,
    compile_here,
    render_here,
    renderer,
)
from whimbrel.tokenization.tokenizer import EncodedPrompt, Tokenizer

__all__ = [
    "ChatTemplate",
    "Message",
    "PLAIN",
    "encode_up_to",
    "load_chat_template",
    "read_template",
    "special_token_texts",
]

Message = Mapping[str, Any]
"""A turn of a conversation: its `role` (system, user, assistant), its `content`, and what else a template reads."""

SETTINGS_FILE, TOKENS_FILE = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

HALVES = range(0xD800, 0xE000)
"""Halves of surrogate pairs, which are in no valid text: marks, which stand in for letters of messages."""

DEEPEST = 64
"""Levels of lists and objects in messages, at most."""

CHARACTERS_PER_TOKEN = 16
"""Of ordinary text there are about 4; of text that has more, two parts are encoded to learn its length."""

CUT_TOKENS = 256
"""By how many tokens a text may be shorter than its beginning, whose last word was cut: no word has more."""


class ChatTemplate:
    """One chat template, ready to render."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        stops: Sequence[str] = (),
        opens_text: bool = True,
        trusted: bool = False,
    ) -> None:
        """`stops` end an answer where no token does; a text that the template does not open, the tokenizer does.

        A `trusted` template runs in this process and without limits: only one that comes with this package is.
        """
        self._trusted = trusted
        self.source, self.stops, self.opens_text = source, tuple(stops), opens_text
        self.special_tokens = dict(special_tokens or {})
        try:
            (compile_here if trusted else renderer.compile)(source)
        except SourceError as error:
            raise DataError(f"the chat template is not valid Jinja {error}") from error
        except LimitExceededError as error:
            raise DataError(f"the chat template takes more than {error} to compile: use another") from error

    def check(self) -> None:
        """Render one short message: a template that takes more time or memory than it may for that is refused."""
        try:
            self._render([{"role": "user", "content": "Hello"}], add_generation_prompt=True, marks=None)
        except LimitExceededError as error:
            raise DataError(f"the chat template takes more than {error} for one short message: use another") from error
        except RefusedError as error:
            logging.getLogger(__name__).warning(
                "the chat template refuses a conversation of one user message: %r", str(error)
            )

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, up to where the assistant's answer begins unless told otherwise."""
        _check(messages)
        return self._run(_each_text(list(messages), str), add_generation_prompt, None)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The ids of a conversation; of one of more than `max_tokens`, as many as show that it is too long.

        Special tokens are those that the template writes: one that has letters of a message in it is plain text,
        whatever became of the message on the way, so that none can end its turn or speak as another.
        """
        _check(messages)
        special = _special_tokens(tokenizer)
        letters = special.marks.letters
        try:
            valid = _each_text(list(messages), _valid)
            marked = self._run(valid, add_generation_prompt, special.marks)
            text = marked.translate(letters)
            text.encode()
        except UnicodeEncodeError as error:
            raise _refused("a message holds half a surrogate pair: give valid Unicode") from error
        spans = [found.span() for found in special.spelled.finditer(text)]
        forged = [(start, end) for start, end in spans if letters.keys() & set(map(ord, marked[start:end]))]
        ids: list[int] = []
        for place, (start, end) in enumerate(itertools.pairwise((0, *itertools.chain(*forged), len(text)))):
            if max_tokens is not None and len(ids) > max_tokens:
                break
            if place % 2:
                ids += tokenizer.encode(text[start:end])
            else:
                opened = place == 0 and not self.opens_text
                encode = functools.partial(tokenizer.encode_prompt, add_special_tokens=opened)
                ids += encode_up_to(encode, text[start:end], max_tokens).ids
        return ids

    def _run(self, messages: Any, add_generation_prompt: bool, marks: Marks | None) -> str:
        """What the template makes of messages, whose letters are marked where `marks` are given."""
        try:
            return self._render(messages, add_generation_prompt, marks)
        except RefusedError as error:
            reason = str(error).translate({} if marks is None else marks.letters)
            raise _refused(f"the model's chat template refuses these messages: {reason}") from error
        except LimitExceededError as error:
            raise _refused(f"the model's chat template takes more than {error} for these messages") from error

    def _render(self, messages: Any, add_generation_prompt: bool, marks: Marks | None) -> str:
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        return (render_here if self._trusted else renderer.render)(self.source, self.special_tokens | given, marks)


def encode_up_to(encode: Callable[[str], EncodedPrompt], text: str, max_tokens: int | None) -> EncodedPrompt:
    """A text encoded; of one that is far too long, only a part that has more than `max_tokens` already.

    To encode takes up to a thousand times the memory of the text, so what is refused anyway is not encoded whole.
    """
    part = text if max_tokens is None else text[: CHARACTERS_PER_TOKEN * max(1, max_tokens)]
    if max_tokens is not None and len(part) < len(text):
        encoded = encode(part)
        if len(encoded.ids) > max_tokens + CUT_TOKENS:
            return encoded
    return encode(text)


def load_chat_template(directory: str | Path, name: str = "default") -> ChatTemplate | None:
    """The chat template of a model directory, or one of the others that it has by name; None where it has none."""
    folder = Path(directory)
    settings = _table(folder / SETTINGS_FILE)
    named = _named_templates(settings.get("chat_template"), folder / SETTINGS_FILE)
    for file in [*folder.glob(f"{TEMPLATE_FOLDER}/*.jinja"), *folder.glob(TEMPLATE_FILE)]:
        named["default" if file.name == TEMPLATE_FILE else file.stem] = read_template(file)
    if name not in named:
        if name == "default" and not named:
            return None
        raise ConfigError(f"{folder} has no chat template '{name}': it has {', '.join(sorted(named)) or 'none'}")
    try:
        template = ChatTemplate(named[name], special_token_texts(folder))
        template.check()
        return template
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error


def read_template(file: Path) -> str:
    """The text of a Jinja file."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 at byte {error.start}: give a Jinja file") from error


def _named_templates(given: object, file: Path) -> dict[str, str]:
    """One template, or a list of named ones, as a table by name."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in given}  # type: ignore[attr-defined]
    except (TypeError, KeyError) as error:
        raise DataError(
            f"chat_template in {file} must be a text, or a list of objects with name and template"
        ) from error


def special_token_texts(directory: str | Path) -> dict[str, str]:
    """What templates call `bos_token`, `eos_token` and the like, as a model directory names them."""
    texts = {}
    for file in (Path(directory) / TOKENS_FILE, Path(directory) / SETTINGS_FILE):
        settings = _table(file)
        for name in SPECIAL_TOKENS:
            token = settings.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(text, str):
                raise DataError(f"{file}: expected {name} to be a token's text or null, got {str(token)[:60]}")
            if text:
                texts[name] = text
    return texts


def _table(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    if not file.is_file():
        return {}
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(table, dict):
        raise DataError(f"{file} holds a {type(table).__name__}, not an object")
    return table


def _check(messages: Sequence[Any]) -> None:
    if not messages:
        raise _refused("a conversation of no messages: give at least one, with a role and a content")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _refused(f"message {place} is {message!r}: give an object with a role and a content")


def _refused(message: str) -> RequestError:
    return RequestError(message, field="messages")


class _Special(NamedTuple):
    """The special tokens of a tokenizer, and how to tell whether a template wrote them or a message did.

    The letters that make a special token are replaced in messages, each by a mark of its own: the template may cut,
    turn and join what it is given, and yet no letter of a message is taken for one of the template's.
    """

    spelled: re.Pattern[str]
    marks: Marks


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer: Tokenizer) -> _Special:
    added = tokenizer.pipeline.get_added_tokens_decoder()
    special = [token.content for token in added.values() if token.special]
    spelled = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
    # A token that is a word is made by its first letter, which a template may turn to a capital or back.
    letters = {each for token in special for each in re.findall(r"[^\w\s]", token) or token[:1] + token[:1].swapcase()}
    marks = {ord(letter): chr(half) for half, letter in zip(HALVES, sorted(letters), strict=False)}
    return _Special(spelled, Marks(marks, {ord(mark): chr(letter) for letter, mark in marks.items()}))


def _valid(text: str) -> str:
    """A text of a message; half a surrogate pair would be taken for a mark."""
    text.encode()
    return text


def _each_text(value: Any, change: Callable[[str], str], levels: int = DEEPEST) -> Any:
    """Messages, or any part of them, with each text changed."""
    if isinstance(value, str):
        return change(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if levels == 0:
        raise _refused(f"a message is nested too deep: give one of fewer than {DEEPEST} levels")
    inner = functools.partial(_each_text, change=change, levels=levels - 1)
    if isinstance(value, Mapping):
        return {inner(key): inner(entry) for key, entry in value.items()}
    return type(value)(inner(entry) for entry in value)


PLAIN = ChatTemplate(
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content | trim }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}",
    stops=("\nUser:",),
    opens_text=False,
    trusted=True,
)
"""For models that were taught no template: a conversation as a play."""
