"""Chat templates: messages to the text that a model was taught to read them as.

A template is a Jinja program that comes with a model, as `transformers` runs it. It runs in a sandbox, and what it
does with messages is no fault of ours: whatever goes wrong there refuses the request.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Pipeline

from whimbrel.base.errors import ConfigError, DataError, RequestError
from whimbrel.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Message", "PLAIN", "load_chat_template", "special_token_texts"]

Message = Mapping[str, Any]
"""A turn of a conversation: its `role` (system, user, assistant), its `content`, and what else a template reads."""

SETTINGS_FILE, TOKENS_FILE = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

OPEN, CLOSE = "\ue0f0", "\ue0f1"
"""Characters that stand for nothing in any text: what messages spell like a special token is put between them."""

QUOTED = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")


class ChatTemplate:
    """One chat template, ready to render."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        stops: Sequence[str] = (),
        opens_text: bool = True,
    ) -> None:
        """`stops` end an answer where no token does; a text that the template does not open, the tokenizer does."""
        self.source, self.stops, self.opens_text = source, tuple(stops), opens_text
        self.special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise DataError(f"the chat template is not valid Jinja in line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, up to where the assistant's answer begins unless told otherwise."""
        _check(messages)
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(self.special_tokens | given)
        except Exception as error:  # a program may fail in any way
            said = " ".join(str(error).split())
            reason = said if isinstance(error, TemplateError) else f"{type(error).__name__}: {said}"
            raise _refused(f"the model's chat template refuses these messages: {reason}") from error

    def encode(
        self, tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation.

        Special tokens are those that the template writes: one that a message spells is plain text, so that no message
        can end its turn or speak as another.
        """
        pipeline, spelled = _with_special_tokens(tokenizer)
        text = self.render(_quoted(messages, spelled), add_generation_prompt=add_generation_prompt)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _refused("a message holds half a surrogate pair: give valid Unicode") from error
        # In batches of one: a text on its own would keep every other thread waiting for its tokens.
        first, *rest = QUOTED.split(text)
        [opening] = pipeline.encode_batch_fast([first], add_special_tokens=not self.opens_text)
        ids: list[int] = list(opening.ids)
        for quoted, written in zip(rest[::2], rest[1::2], strict=True):
            [encoding] = pipeline.encode_batch_fast([written], add_special_tokens=False)
            ids += tokenizer.encode(quoted) + encoding.ids
        return ids


def load_chat_template(directory: str | Path, name: str = "default") -> ChatTemplate | None:
    """The chat template of a model directory, or one of the others that it has by name; None where it has none."""
    folder = Path(directory)
    settings = _table(folder / SETTINGS_FILE)
    named = _named_templates(settings.get("chat_template"), folder / SETTINGS_FILE)
    for file in [*folder.glob(f"{TEMPLATE_FOLDER}/*.jinja"), *folder.glob(TEMPLATE_FILE)]:
        named["default" if file.name == TEMPLATE_FILE else file.stem] = file.read_text(encoding="utf-8")
    if name not in named:
        if name == "default" and not named:
            return None
        raise ConfigError(f"{folder} has no chat template '{name}': it has {', '.join(sorted(named)) or 'none'}")
    try:
        return ChatTemplate(named[name], special_token_texts(folder))
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error


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
    settings = _table(Path(directory) / TOKENS_FILE) | _table(Path(directory) / SETTINGS_FILE)
    named = {name: settings[name] for name in SPECIAL_TOKENS if settings.get(name)}
    return {name: str(token["content"] if isinstance(token, dict) else token) for name, token in named.items()}


def _table(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    if not file.is_file():
        return {}
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
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


def _quoted(value: Any, spelled: re.Pattern[str]) -> Any:
    """Messages whose texts have the special tokens they spell marked."""
    if isinstance(value, str):
        return spelled.sub(rf"{OPEN}\g<0>{CLOSE}", value.replace(OPEN, "").replace(CLOSE, ""))
    if isinstance(value, Mapping):
        return {key: _quoted(entry, spelled) for key, entry in value.items()}
    return [_quoted(entry, spelled) for entry in value] if isinstance(value, list | tuple) else value


@functools.lru_cache(maxsize=8)
def _with_special_tokens(tokenizer: Tokenizer) -> tuple[Pipeline, re.Pattern[str]]:
    """The tokenizer's pipeline as one that reads special tokens where a text spells them, and what finds those."""
    pipeline = Pipeline.from_str(tokenizer.to_json())
    pipeline.encode_special_tokens = False
    special = [token.content for token in pipeline.get_added_tokens_decoder().values() if token.special]
    return pipeline, re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as templates expect it: blocks leave no blank lines, JSON is not escaped for HTML."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


class _Generation(Extension):
    """`{% generation %}`, which marks what the assistant wrote for training: here its text and no more."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


PLAIN = ChatTemplate(
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content | trim }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}",
    stops=("\nUser:",),
    opens_text=False,
)
"""For models that were taught no template: a conversation as a play."""
