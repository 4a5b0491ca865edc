"""Multiple-choice tasks: file formats, prompts as in lm-eval, and metrics.

A line of a task file is a record as the dataset was published, or in the short form {query, choices, gold}.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import re
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.evaluate.scoring import Score
from whimbrel.models.held_out_loss import perplexity

__all__ = ["DATA_ENV_VAR", "TASKS", "Estimate", "Item", "Metric", "Task", "find_file", "find_task", "read_items"]

DATA_ENV_VAR = "WHIMBREL_EVAL_DATA"
"""Environment variable with the directory of the task files."""
DEFAULT_DIRECTORY = Path("data", "eval")
SUFFIXES = (".jsonl", ".jsonl.gz")
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One question."""

    pairs: tuple[tuple[str, str], ...]
    """Context and continuation of each choice."""
    gold: int
    """Index of the correct choice."""
    lengths: tuple[int, ...]
    """Characters of each choice."""


# Metrics


class Estimate(NamedTuple):
    """A metric over a sample of items."""

    value: float
    stderr: float | None
    """Standard error; None for a single item."""


class Metric(NamedTuple):
    """A per-item value and its aggregation over items."""

    evaluate: Callable[[Item, Sequence[Score]], float]
    aggregate: Callable[[Sequence[float]], Estimate]


def _mean(values: Sequence[float]) -> Estimate:
    stderr = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), stderr)


def _perplexity(loglikelihoods: Sequence[float]) -> Estimate:
    """The standard error is that of the mean, propagated through the exponential to first order."""
    mean, stderr = _mean(loglikelihoods)
    value = perplexity(-mean)
    return Estimate(value, None if stderr is None else value * stderr)


def _argmax(values: Sequence[float]) -> int:
    """The first index of the maximum."""
    return max(range(len(values)), key=values.__getitem__)


def _is_correct_per_character(item: Item, scores: Sequence[Score]) -> float:
    per_character = [each.loglikelihood / length for each, length in zip(scores, item.lengths, strict=True)]
    return float(_argmax(per_character) == item.gold)


ACCURACY = Metric(lambda item, scores: float(_argmax([each.loglikelihood for each in scores]) == item.gold), _mean)
"""The most likely choice is correct."""
NORMALIZED_ACCURACY = Metric(_is_correct_per_character, _mean)
"""The choice with the highest log-likelihood per character is correct; does not favor short answers."""
EXACT_MATCH = Metric(lambda item, scores: float(scores[item.gold].is_greedy), _mean)
"""Greedy decoding generates the correct answer."""
PERPLEXITY = Metric(lambda item, scores: scores[item.gold].loglikelihood, _perplexity)
"""The exponential of the mean negative log-likelihood per answer (not per token)."""
CHOICE_METRICS = {"acc": ACCURACY, "acc_norm": NORMALIZED_ACCURACY}


# Records


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


TEXT = FieldType("a valid Unicode string", _is_valid_string)
TEXTS = FieldType("a list of strings", _is_string_list)
SENTENCE = FieldType("a sentence with _ in place of a name", lambda value: _is_valid_string(value) and "_" in value)
LABELED = FieldType("an object with 'text' and 'label', two lists of strings of equal length", _is_labeled)
NUMBER = FieldType("a 0-based integer index", lambda value: type(value) is int)
NUMBER_OR_DIGITS = FieldType(NUMBER.description, lambda value: bool(re.fullmatch("[0-9]{1,9}", str(value))))
ONE_OR_TWO = FieldType('"1" or "2"', lambda value: value in ("1", "2"))


class RecordFormat(NamedTuple):
    """A format of records."""

    fields: Mapping[str, FieldType]
    """Required fields; the presence of the first identifies the format."""
    read: Callable[[Record], Item]


@dataclass(frozen=True, slots=True)
class Task:
    """A set of questions and its metrics."""

    name: str
    file: str
    """The file name without `.jsonl` or `.jsonl.gz`."""
    formats: Sequence[RecordFormat]
    metrics: Mapping[str, Metric]

    def item(self, record: Record) -> Item:
        """Convert a record; raises DataError for missing or invalid fields."""
        record_format = next(
            (candidate for candidate in self.formats if next(iter(candidate.fields)) in record), self.formats[-1]
        )
        for field, field_type in record_format.fields.items():
            if field not in record:
                expected = " or ".join(f"({', '.join(each.fields)})" for each in self.formats)
                raise DataError(f"expected fields {expected}, got ({', '.join(record)}): '{field}' is missing")
            if not field_type.is_valid(record[field]):
                raise DataError(f"expected {field_type.description} in '{field}', got {json.dumps(record[field]):.60}")
        item = record_format.read(record)
        if not 0 <= item.gold < len(item.pairs):
            raise DataError(f"expected the index of the correct choice below {len(item.pairs)}, got {item.gold}")
        if not all(item.lengths):
            raise DataError("expected non-empty choices, got an empty one")
        return item


def _shared_context(context: str, choices: Sequence[str], gold: int) -> Item:
    """Choices after the same context."""
    return Item(tuple((context, f" {choice}") for choice in choices), gold, tuple(map(len, choices)))


def _hellaswag(record: Record) -> Item:
    context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return _shared_context(
        _clean_wikihow(context), [_clean_wikihow(ending) for ending in record["endings"]], int(record["label"])
    )


def _clean_wikihow(text: str) -> str:
    """Remove WikiHow markup: a title ends a sentence, other brackets are deleted."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _arc(record: Record) -> Item:
    labels, answer = record["choices"]["label"], record["answerKey"]
    if answer not in labels:
        raise DataError(f"expected one of the labels {', '.join(labels):.60} in 'answerKey', got {answer!r:.60}")
    return _shared_context(f"Question: {record['question']}\nAnswer:", record["choices"]["text"], labels.index(answer))


def _piqa(record: Record) -> Item:
    return _shared_context(f"Question: {record['goal']}\nAnswer:", [record["sol1"], record["sol2"]], record["label"])


def _shared_continuation(contexts: Sequence[str], rest: str, gold: int) -> Item:
    """The same continuation after different contexts (partial evaluation)."""
    return Item(tuple((context, f" {rest}") for context in contexts), gold, (len(rest),) * len(contexts))


def _winogrande(record: Record) -> Item:
    before, _, rest = record["sentence"].partition("_")
    return _shared_continuation(
        [before + record["option1"], before + record["option2"]], rest.strip(), int(record["answer"]) - 1
    )


def _lambada(record: Record) -> Item:
    """Predict the last word of a passage."""
    context, _, word = record["text"].rpartition(" ")
    return _shared_context(context, [word], 0)


SHORT = {"query": TEXT, "choices": TEXTS, "gold": NUMBER}
ARC = (
    RecordFormat(SHORT, lambda record: _shared_context(record["query"], record["choices"], record["gold"])),
    RecordFormat({"question": TEXT, "choices": LABELED, "answerKey": TEXT}, _arc),
)
HELLASWAG = (
    RecordFormat(
        {"activity_label": TEXT, "ctx_a": TEXT, "ctx_b": TEXT, "endings": TEXTS, "label": NUMBER_OR_DIGITS}, _hellaswag
    ),
)
LAMBADA = (
    RecordFormat(
        {"context": TEXT, "continuation": TEXT},
        lambda record: _shared_context(record["context"], [record["continuation"]], 0),
    ),
    RecordFormat({"text": TEXT}, _lambada),
)
PIQA = (
    RecordFormat(SHORT, lambda record: _shared_context(f"{record['query']}Answer:", record["choices"], record["gold"])),
    RecordFormat({"goal": TEXT, "sol1": TEXT, "sol2": TEXT, "label": NUMBER}, _piqa),
)
WINOGRANDE = (
    RecordFormat(
        {"context_options": TEXTS, "continuation": TEXT, "gold": NUMBER},
        lambda record: _shared_continuation(record["context_options"], record["continuation"], record["gold"]),
    ),
    RecordFormat({"sentence": SENTENCE, "option1": TEXT, "option2": TEXT, "answer": ONE_OR_TWO}, _winogrande),
)

TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("arc_challenge", "arc_challenge_test", ARC, CHOICE_METRICS),
        Task("arc_easy", "arc_easy_test", ARC, CHOICE_METRICS),
        Task("hellaswag", "hellaswag_val", HELLASWAG, CHOICE_METRICS),
        Task("lambada", "lambada_openai_test", LAMBADA, {"acc": EXACT_MATCH, "perplexity": PERPLEXITY}),
        Task("piqa", "piqa_val", PIQA, CHOICE_METRICS),
        Task("winogrande", "winogrande_val", WINOGRANDE, {"acc": ACCURACY}),
    )
}
"""All tasks by name."""


# Files


def find_task(name: str) -> Task:
    """Raises ConfigError for an unknown name."""
    if name not in TASKS:
        raise ConfigError(f"unknown task '{name}': choose from {', '.join(TASKS)}")
    return TASKS[name]


def find_file(task: Task, data: str | os.PathLike[str] | None = None) -> Path:
    """The file of a task: in the directory `data`, else in the directory of WHIMBREL_EVAL_DATA, else in `data/eval`."""
    directory = Path(data or os.environ.get(DATA_ENV_VAR) or DEFAULT_DIRECTORY)
    names = [stem + suffix for stem in (task.file, task.name) for suffix in SUFFIXES]
    found = next((path for name in names if (path := directory / name).is_file()), None)
    if found is None:
        raise DataError(
            f"no file for task {task.name} in {directory}: expected {', '.join(names)}; set --data or {DATA_ENV_VAR}"
        )
    return found


def read_items(task: Task, path: Path, limit: int | None = None) -> list[Item]:
    """Read the items in a file, at most the first `limit`."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit: expected at least 1, got {limit}")
    items = []
    for line, record in itertools.islice(_read_records(path), limit):
        try:
            items.append(task.item(record))
        except DataError as error:
            raise DataError(f"{path} line {line}: {error}") from error
    if not items:
        raise DataError(f"{path} has no items for task {task.name}")
    return items


def _read_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
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
