"""Parsers for tool calls in generated text.

A parser receives text in chunks and separates it into content and complete calls. Whitespace around calls is dropped,
so that a template renders the message as the model wrote it. Invalid calls are returned as content.

| format | text | models |
|---|---|---|
| `hermes` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a list of objects | Hermes, Qwen, SmolLM |
| `llama3_json` | `{"name": ..., "parameters": {...}}`, several separated by `;` | Llama 3 |
"""

from __future__ import annotations

import functools
import json
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

from whimbrel.base.errors import RequestError
from whimbrel.inference.detokenizer import partial_match
from whimbrel.tokenization import ChatTemplate

__all__ = [
    "HermesParser",
    "Llama3JsonParser",
    "ParsedText",
    "ToolCall",
    "ToolCallParser",
    "find_parser",
    "supports_tools",
]

START, END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
SEPARATOR = re.compile(r"[\s;]*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function."""

    index: int
    """Position among the calls of the message."""
    id: str
    name: str
    arguments: str
    """A JSON object."""


class ParsedText(NamedTuple):
    """What a parser found in a piece of text."""

    content: str = ""
    calls: Sequence[ToolCall] = ()


class ToolCallParser(Protocol):
    """Separates the calls of one message from its content."""

    special_tokens: Collection[str]
    """Tokens that the parser needs in the text, even if they are special tokens of the tokenizer."""

    def push(self, piece: str) -> ParsedText:
        """Add a chunk; returns the content and calls that can no longer change."""
        ...

    def flush(self) -> ParsedText:
        """Whatever was held back, after the last chunk."""
        ...


class HermesParser:
    """Calls between `<tool_call>` and `</tool_call>`; the last closing tag may be missing."""

    special_tokens: Collection[str] = (START, END)

    def __init__(self) -> None:
        self._text = ""  # not yet returned: may belong to a call
        self._searched = 0
        self._in_call = False
        self._num_calls = 0

    def push(self, piece: str) -> ParsedText:
        self._text += piece
        content, calls = "", list[ToolCall]()
        while True:
            marker = END if self._in_call else START
            index = self._text.find(marker, max(0, self._searched - len(marker)))
            if index < 0:
                break
            if self._in_call:
                index += len(END)
                content += self._end_call(self._text[:index], calls)
            else:
                before = self._text[:index].rstrip()  # whitespace before the tag is dropped only if it is a call
                content += before
                index = len(before)
            self._text, self._searched, self._in_call = self._text[index:], 0, not self._in_call
        self._searched = len(self._text)
        if not self._in_call:
            certain = len(self._text[: len(self._text) - partial_match(self._text, START)].rstrip())
            content += self._text[:certain]
            self._text, self._searched = self._text[certain:], 0
        return ParsedText(content, calls)

    def flush(self) -> ParsedText:
        text, self._text = self._text, ""
        calls: list[ToolCall] = []
        if self._in_call:
            return ParsedText(self._end_call(text, calls), calls)
        return ParsedText("" if self._num_calls and not text.strip() else text)

    def _end_call(self, text: str, calls: list[ToolCall]) -> str:
        """Add the calls of a complete tag to `calls`; returns the text if it is not valid."""
        found = _parse_calls(text.strip().removeprefix(START).removesuffix(END), self._num_calls)
        calls += found
        self._num_calls += len(found)
        return "" if found else text


class Llama3JsonParser:
    """A message that consists of calls only. Text that starts with `{` is held back until the end."""

    special_tokens: Collection[str] = ()

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the available functions: objects with other names are JSON answers, not calls."""
        self._names = names
        self._text = ""
        self._is_content = False

    def push(self, piece: str) -> ParsedText:
        self._text += piece
        start = self._text[: 4 * len(PYTHON_TAG)].lstrip()
        if not self._is_content and (start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start)):
            return ParsedText()
        self._is_content = True
        content, self._text = self._text, ""
        return ParsedText(content)

    def flush(self) -> ParsedText:
        text, self._text = self._text, ""
        calls = [] if self._is_content else _parse_calls(text.strip().removeprefix(PYTHON_TAG), 0)
        if any(call.name not in self._names for call in calls):
            calls = []
        return ParsedText("" if calls else text, calls)


def find_parser(template: ChatTemplate, names: Collection[str]) -> Callable[[], ToolCallParser]:
    """The parser for calls of these functions, in the format that the chat template writes."""
    source = template.source.replace('\\"', '"')  # in Jinja strings
    if '"name"' in source and START in source:
        return HermesParser
    if '"name"' in source and '"parameters"' in source:
        return functools.partial(Llama3JsonParser, names)
    expected = (
        f'expected a chat template that writes tool calls as {START}{{"name": ...}} or {{"name": ..., "parameters"'
    )
    raise RequestError(f"{expected}: ...}}, got one with another format: remove tools", field="tools")


def supports_tools(template: ChatTemplate) -> bool:
    """Whether the chat template renders tools, and writes calls in a format that has a parser."""
    try:
        find_parser(template, ())
    except RequestError:
        return False
    return template.features.reads_tools


def _parse_calls(text: str, first_index: int) -> list[ToolCall]:
    """The calls in a sequence of JSON objects or lists of them; empty if one is not valid."""
    try:
        calls = []
        for index, (name, arguments) in enumerate(map(_function, _objects(text)), first_index):
            encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            calls.append(ToolCall(index, f"call_{uuid.uuid4().hex[:24]}", name, encoded))
    except (ValueError, RecursionError):
        return []
    return calls


def _objects(text: str) -> Iterator[Any]:
    decoder, position = json.JSONDecoder(parse_constant=_reject_constant), 0
    while (match := SEPARATOR.match(text, position)) and match.end() < len(text):
        value, position = decoder.raw_decode(text, match.end())
        yield from value if isinstance(value, list) else [value]


def _function(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call; a function without parameters may be called without arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("expected an object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise ValueError("expected arguments as an object")
    return value["name"], arguments


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
