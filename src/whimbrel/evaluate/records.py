"""JSON Lines files of tasks: typed fields, record formats, and errors that name the file and the line."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from whimbrel.base.errors import DataError

__all__ = [
    "LABELED",
    "MESSAGES",
    "NUMBER",
    "NUMBER_OR_DIGITS",
    "ONE_OR_TWO",
    "SENTENCE",
    "SOLUTION",
    "SUFFIXES",
    "TEXT",
    "TEXTS",
    "FieldType",
    "Item",
    "Record",
    "RecordFormat",
    "parse_record",
    "read_records",
]

SUFFIXES = (".jsonl", ".jsonl.gz")
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One question."""

    pairs: tuple[tuple[str, str], ...]
    """Context and continuation of each choice; a question to generate the answer of has one choice, the answer."""
    gold: int
    """Index of the correct choice."""
    lengths: tuple[int, ...]
    """Characters of each choice."""
    history: tuple[tuple[str, str], ...] = ()
    """Role and content of the messages before the context, if the item is a conversation."""


class FieldType(NamedTuple):
    """The type of a field in a record."""

    description: str
    is_valid: Callable[[Any], bool]


def _is_valid_string(value: object) -> bool:
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _is_string_list(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(map(_is_valid_string, value))


def _is_labeled(value: object) -> bool:
    texts, labels = (value.get("text"), value.get("label")) if isinstance(value, dict) else (None, None)
    return _is_string_list(texts) and _is_string_list(labels) and len(texts) == len(labels)


def _is_conversation(value: object) -> bool:
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(message, dict) for message in value):
        return False
    texts = [message.get(key) for message in value for key in ("role", "content")]
    return _is_string_list(texts) and [message["role"] for message in value[-2:]] == ["user", "assistant"]


TEXT = FieldType("a valid Unicode string", _is_valid_string)
TEXTS = FieldType("a list of strings", _is_string_list)
SENTENCE = FieldType("a sentence with _ in place of a name", lambda value: _is_valid_string(value) and "_" in value)
LABELED = FieldType("an object with 'text' and 'label', two lists of strings of equal length", _is_labeled)
MESSAGES = FieldType("a list of messages with role and content that ends with user, assistant", _is_conversation)
SOLUTION = FieldType(
    "a solution that ends with '#### ' and the answer (for other answers use the fields prompt and answer)",
    lambda value: _is_valid_string(value) and bool(re.search(r"#### \S", value)),
)
NUMBER = FieldType("a 0-based integer index", lambda value: type(value) is int)
NUMBER_OR_DIGITS = FieldType(NUMBER.description, lambda value: bool(re.fullmatch("[0-9]{1,9}", str(value))))
ONE_OR_TWO = FieldType('"1" or "2"', lambda value: value in ("1", "2"))


class RecordFormat(NamedTuple):
    """A format of records."""

    fields: Mapping[str, FieldType]
    """Required fields; the presence of the first identifies the format."""
    read: Callable[[Record], Item]


def parse_record(formats: Sequence[RecordFormat], record: Record) -> Item:
    """Convert a record; raises DataError for missing or invalid fields."""
    record_format = next((candidate for candidate in formats if next(iter(candidate.fields)) in record), formats[-1])
    for field, field_type in record_format.fields.items():
        if field not in record:
            expected = " or ".join(f"({', '.join(each.fields)})" for each in formats)
            raise DataError(f"expected fields {expected}, got ({', '.join(record)}): '{field}' is missing")
        if not field_type.is_valid(record[field]):
            raise DataError(f"expected {field_type.description} in '{field}', got {json.dumps(record[field]):.60}")
    item = record_format.read(record)
    if not 0 <= item.gold < len(item.pairs):
        raise DataError(f"expected the index of the correct choice below {len(item.pairs)}, got {item.gold}")
    if not all(item.lengths):
        raise DataError("expected non-empty choices, got an empty one")
    return item


def read_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects in a JSON Lines file, with their line numbers."""
    number = 0
    try:
        open_text = gzip.open if path.suffix == ".gz" else open
        # utf-8-sig accepts the byte-order mark that Windows editors add.
        with open_text(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parse_record(line, f"{path} line {number}")
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"cannot read {path} after line {number}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 after line {number}: {error.reason}") from error


def _parse_record(line: str, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (RecursionError, ValueError) as error:  # nested too deeply, or an integer with too many digits
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object, got {type(record).__name__}")
    return record
