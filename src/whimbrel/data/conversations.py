"""Fine-tuning data: conversations, documents and preference pairs, from jsonl, parquet and Hub datasets.

| format | fields of a row |
|---|---|
| `messages` | `messages`: role and content, as in OpenAI's API |
| `prompt-completion` | `prompt`, `completion`: strings or messages; only the completion is supervised |
| `sharegpt` | `conversations`: `from` and `value` |
| `alpaca` | `instruction`, `output`; optional `input`, `history` |
| `preference` | `chosen`, `rejected`: strings or messages; `prompt`, unless both start with the same messages |
| `text` | `text` |

The format of a file is detected from its first row. All but `text` become messages, checked row by row; they may have
the fields `system` (a system prompt), `tools` (a list of JSON schemas, or the JSON of one) and `id` (unique).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.config import not_one_of
from whimbrel.data.sources import Row, Source, resolve_source
from whimbrel.tokenization import Chat

__all__ = [
    "FORMATS",
    "SKIP_BAD_HINT",
    "BadSampleError",
    "Conversation",
    "ConversationReader",
    "Document",
    "PreferencePair",
    "ReadReport",
    "Sample",
    "detect_format",
    "parse_sample",
]

FORMATS = {
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
"""The required fields of each format. A row with the fields of several has the first of those formats."""

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
SHAREGPT_ROLES = ROLES | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Names of roles in the data, and the roles that templates know."""

SKIP_BAD_HINT = "--skip-bad skips invalid samples"
MAX_REPORTED_ERRORS = 10
SHOWN_CHARACTERS = 60


class BadSampleError(DataError):
    """A row that cannot be trained on; `reason` is its kind of error, for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Conversation(NamedTuple):
    """Messages to train on."""

    location: str
    chat: Chat


class Document(NamedTuple):
    """Plain text to train on."""

    location: str
    text: str


class PreferencePair(NamedTuple):
    """Two conversations that differ in the answers to the same prompt; only the answers are supervised."""

    location: str
    chosen: Chat
    rejected: Chat


Sample = Conversation | Document | PreferencePair


@dataclass(slots=True)
class ReadReport:
    """What was read."""

    formats: dict[str, str]
    """The format of each source."""
    samples: int
    """Number of valid rows."""
    skipped: Counter[str]
    """Number of skipped rows by reason."""
    errors: list[str]
    """Messages of the first skipped rows, with their lines."""

    @property
    def num_skipped(self) -> int:
        """Number of skipped rows."""
        return self.skipped.total()

    def skip(self, error: BadSampleError, location: str) -> None:
        """Count a row that is skipped."""
        self.skipped[error.reason] += 1
        if len(self.errors) < MAX_REPORTED_ERRORS:
            self.errors.append(f"{location}: {error}")


class ConversationReader:
    """Iterates over the samples of files, directories, globs and Hub datasets.

    A bad row raises DataError with its line, or is skipped and counted in `report` if `skip_bad`.
    """

    def __init__(self, sources: Sequence[str], *, format: str | None = None, skip_bad: bool = False) -> None:  # noqa: A002
        if format is not None and format not in FORMATS:
            raise ConfigError(not_one_of("format", format, tuple(FORMATS)))
        self.sources: list[Source] = [source for path in sources for source in resolve_source(path)]
        self.format, self.skip_bad = format, skip_bad
        self.report = ReadReport({}, 0, Counter(), [])

    def __iter__(self) -> Iterator[Sample]:
        self.report = ReadReport({}, 0, Counter(), [])
        for source in self.sources:
            yield from self._read(source)
        if not self.report.samples:
            skipped = f" ({self.report.num_skipped} skipped: {self.report.errors[0]})" if self.report.errors else ""
            raise DataError(f"no samples in {', '.join(source.name for source in self.sources)}{skipped}")

    def _read(self, source: Source) -> Iterator[Sample]:
        data_format, detected_at, first_locations = self.format, "", dict[Any, str]()
        for row in source.rows():
            try:
                if isinstance(row.value, DataError):
                    raise BadSampleError("not JSON", str(row.value))
                if data_format is None:
                    data_format, detected_at = _detect(row), row.location
                self._add_format(source.name, data_format)
                _check_format(row.value, data_format, detected_at)
                _check_id(row, first_locations)
                sample = parse_sample(row.value, data_format, row.location)
            except BadSampleError as error:
                if not self.skip_bad:
                    raise DataError(f"{row.location}: {error} ({SKIP_BAD_HINT})") from error
                self.report.skip(error, row.location)
                continue
            self.report.samples += 1
            yield sample

    def _add_format(self, name: str, data_format: str) -> None:
        formats = self.report.formats
        formats[name] = data_format
        if len({other == "preference" for other in formats.values()}) > 1:
            listed = ", ".join(f"{source} ({kind})" for source, kind in formats.items())
            raise DataError(f"expected preference data in all files or in none, got {listed}")


def detect_format(row: Mapping[str, Any]) -> str | None:
    """The format of a row; None if it has the fields of none."""
    return next((name for name, fields in FORMATS.items() if all(field in row for field in fields)), None)


def parse_sample(row: Mapping[str, Any], data_format: str, location: str = "") -> Sample:
    """Check a row and normalize it; raises BadSampleError, without the location."""
    if data_format == "text":
        return Document(location, _text(row, "text"))
    tools, system = _tools(row.get("tools")), _system(row)
    if data_format == "preference":
        prompt, chosen, rejected = _preference(row)
        prompt = [*system, *prompt]
        pair = [_chat([*prompt, *answer], tools, num_context=len(prompt)) for answer in (chosen, rejected)]
        return PreferencePair(location, *pair)
    if data_format == "prompt-completion":
        prompt = [*system, *_turns(row["prompt"], "prompt", "user")]
        completion = _turns(row["completion"], "completion", "assistant")
        return Conversation(location, _chat([*prompt, *completion], tools, num_context=len(prompt)))
    field = FORMATS[data_format][0]
    messages = _alpaca(row) if data_format == "alpaca" else _messages(row[field], field)
    return Conversation(location, _chat([*system, *messages], tools))


# Checks


def _detect(row: Row) -> str:
    assert isinstance(row.value, dict)
    detected = detect_format(row.value)
    if detected is None:
        expected = "; ".join(f"{' and '.join(fields)} ({name})" for name, fields in FORMATS.items())
        keys = ", ".join(row.value) or "none"
        raise BadSampleError("missing fields", f"expected the fields {expected}; got {keys}")
    return detected


def _check_format(row: Mapping[str, Any], data_format: str, detected_at: str) -> None:
    missing = [field for field in FORMATS[data_format] if field not in row]
    if not missing:
        return
    other = detect_format(row)
    if other is not None and detected_at:
        raise BadSampleError(
            "mixed formats",
            f"expected format {data_format}, as in {detected_at}, got {other}: split the file by format",
        )
    got = ", ".join(row) or "none"
    raise BadSampleError("missing fields", f"expected '{missing[0]}' (format {data_format}), got the fields {got}")


def _check_id(row: Row, first_locations: dict[Any, str]) -> None:
    assert isinstance(row.value, dict)
    row_id = row.value.get("id")
    if not isinstance(row_id, str | int):
        return
    first = first_locations.setdefault(row_id, row.location)
    if first != row.location:
        raise BadSampleError("duplicate id", f"duplicate id {_show(row_id)}, first in {first}")


def _chat(messages: list[dict[str, Any]], tools: list[Any] | None, *, num_context: int = 0) -> Chat:
    """Check the turns of a conversation as a whole; answers among the first `num_context` messages are a prompt.

    As in OpenAI's API, an answer with `weight` 0 is not trained on.
    """
    if len(messages) > 1 and messages[0]["role"] == messages[1]["role"] == "system":
        raise BadSampleError("wrong role", "expected one system prompt, got a 'system' field and a system message")
    if messages[0]["role"] == "assistant":
        raise BadSampleError("wrong role", "expected a system or user message first, got assistant")
    weights = [message.get("weight", 1) for message in messages]
    messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    supervised = [index for index in answers if index >= num_context and weights[index] != 0]
    if not supervised:
        raise BadSampleError("no assistant turn", "expected an assistant turn to train on, got none")
    return Chat(messages, tools, None if supervised == answers else tuple(supervised))


def _messages(value: Any, field: str) -> list[dict[str, Any]]:
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        # datasets' Sequence of objects: one list per field
        value = [dict(zip(value, row, strict=True)) for row in itertools.zip_longest(*value.values())]
    if not isinstance(value, list) or not value:
        raise BadSampleError("missing fields", f"expected a list of messages in '{field}', got {_show(value)}")
    return [_message(message, f"{field}[{index}]") for index, message in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadSampleError(
            "missing fields", f"expected {name} to be an object with role and content, got {_show(value)}"
        )
    is_sharegpt = "from" in value and "role" not in value
    role_key, content_key, roles = ("from", "value", SHAREGPT_ROLES) if is_sharegpt else ("role", "content", ROLES)
    if role_key not in value:
        raise BadSampleError("missing fields", f"expected '{role_key}' in {name}, got {_show(value)}")
    given = value[role_key]
    role = roles.get(given) if isinstance(given, str) else None
    if role is None:
        raise BadSampleError(
            "wrong role", f"expected the role of {name} to be one of {', '.join(roles)}, got {_show(given)}"
        )
    if is_sharegpt:
        message: dict[str, Any] = {"role": role, "content": value.get(content_key)}
        if given == "function_call":
            message |= {"content": "", "tool_calls": [{"type": "function", "function": value.get(content_key)}]}
    else:
        message = {**value, "role": role, "content": value.get(content_key)}
    if message.get("tool_calls"):
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{name}.tool_calls")
    message["content"] = _content(message, f"{name}.{content_key}")
    return message


def _content(message: Mapping[str, Any], name: str) -> str:
    """The text of a message; parts of type text are joined."""
    content, role = message["content"], message["role"]
    if isinstance(content, list):
        for part in content:
            if (
                not isinstance(part, dict)
                or part.get("type", "text") != "text"
                or not isinstance(part.get("text"), str)
            ):
                raise BadSampleError("nested content", f"expected {name} to be text, got the part {_show(part)}")
        content = "".join(part["text"] for part in content)
    if content is None and (message.get("tool_calls") or role == "system"):
        return ""
    if content is None:
        raise BadSampleError("missing fields", f"expected a string in {name}, got none")
    if not isinstance(content, str):
        raise BadSampleError("nested content", f"expected {name} to be a string, got {_show(content)}")
    if role in ("user", "assistant") and not content.strip() and not message.get("tool_calls"):
        raise BadSampleError("empty turn", f"expected text in {name} (role {role}), got {_show(content)}")
    return content


def _tool_calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: OpenAI's API has them as JSON strings, templates expect objects."""
    if not isinstance(value, list):
        raise BadSampleError("wrong tools", f"expected {name} to be a list, got {_show(value)}")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, dict) else None
        function = _parse_json(function, f"{name}[{index}]")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadSampleError(
                "wrong tools", f"expected a function with a name in {name}[{index}], got {_show(value[index])}"
            )
        arguments = _parse_json(function.get("arguments", {}), f"{name}[{index}].arguments")
        function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return calls


def _tools(value: Any) -> list[Any] | None:
    tools = _parse_json(value, "tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadSampleError("wrong tools", f"expected 'tools' to be a list of JSON schemas, got {_show(tools)}")
    return tools


def _parse_json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadSampleError("wrong tools", f"expected JSON in {name}, got {_show(value)}") from error


def _turns(value: Any, field: str, role: str) -> list[dict[str, Any]]:
    """Messages, or a string as one message."""
    return [_message({"role": role, "content": value}, field)] if isinstance(value, str) else _messages(value, field)


def _alpaca(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    instruction = _text(row, "instruction")
    if row.get("input"):
        instruction = f"{instruction}\n\n{_text(row, 'input', may_be_blank=True)}".rstrip()
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadSampleError("nested content", f"expected 'history' to be a list of pairs, got {_show(pairs)}")
    messages: list[dict[str, Any]] = []
    for index, (question, answer) in enumerate([*pairs, (instruction, row["output"])]):
        name = "output" if index == len(pairs) else f"history[{index}]"
        messages += [_message({"role": "user", "content": question}, name)]
        messages += [_message({"role": "assistant", "content": answer}, name)]
    return messages


def _preference(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], ...]:
    """Prompt, chosen and rejected messages. `chosen` and `rejected` may repeat the prompt."""
    chosen, rejected = (_turns(row[field], field, "assistant") for field in ("chosen", "rejected"))
    if row.get("prompt") is None:
        pairs = zip(chosen, rejected, strict=False)
        shared = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
        prompt = chosen[:shared]
    else:
        prompt = _turns(row["prompt"], "prompt", "user")
    if all(answer[: len(prompt)] == prompt for answer in (chosen, rejected)):
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if chosen == rejected:
        raise BadSampleError("no preference", "expected different answers in 'chosen' and 'rejected', got the same")
    for field, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer or answer[0]["role"] != "assistant":
            got = answer[0]["role"] if answer else "nothing"
            raise BadSampleError("wrong role", f"expected '{field}' to answer the prompt (role assistant), got {got}")
    if not prompt:
        raise BadSampleError("missing fields", "expected a 'prompt', or 'chosen' and 'rejected' that start with one")
    return prompt, chosen, rejected


def _system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The system prompt, if the row has it as a field of its own."""
    return [{"role": "system", "content": _text(row, "system", may_be_blank=True)}] if row.get("system") else []


def _text(row: Mapping[str, Any], field: str, *, may_be_blank: bool = False) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        raise BadSampleError("nested content", f"expected a string in '{field}', got {_show(value)}")
    if not value.strip() and not may_be_blank:
        raise BadSampleError("empty turn", f"expected text in '{field}', got {_show(value)}")
    return value


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
