"""The tasks: how a line of each file becomes a question, worded as lm-eval words it, and what is measured on it.

A line may be as the dataset was published, or in the short form {query, choices, gold}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from whimbrel.base.errors import DataError
from whimbrel.evaluate.metrics import Item, Metric, accuracy, exact, normalised_accuracy, perplexity_per_item

__all__ = ["TASKS", "Task"]

Record = Mapping[str, Any]
CHOICE = {"acc": accuracy, "acc_norm": normalised_accuracy}


class Kind(NamedTuple):
    """What a field may hold."""

    wanted: str
    holds: Callable[[Any], bool]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_labelled(value: object) -> bool:
    texts, labels = (value.get("text"), value.get("label")) if isinstance(value, dict) else (None, None)
    return _is_texts(texts) and _is_texts(labels) and len(texts) == len(labels)


TEXT = Kind("a text of valid Unicode", _is_text)
TEXTS = Kind("a list of texts", _is_texts)
SENTENCE = Kind("a text with _ in place of a name", lambda value: _is_text(value) and "_" in value)
LABELLED = Kind("an object with text and label, lists of texts that are equally long", _is_labelled)
NUMBER = Kind("a whole number, counted from 0", lambda value: type(value) is int)
NUMBER_OR_DIGITS = Kind(NUMBER.wanted, lambda value: bool(re.fullmatch("[0-9]{1,9}", str(value))))
ONE_OR_TWO = Kind('"1" or "2"', lambda value: value in ("1", "2"))


class Form(NamedTuple):
    """A way to write a question down."""

    fields: Mapping[str, Kind]
    """What a line has; the first tells the form from others."""
    read: Callable[[Record], Item]


@dataclass(frozen=True, slots=True)
class Task:
    """A set of questions."""

    name: str
    file: str
    """The name of its file, before `.jsonl` or `.jsonl.gz`."""
    forms: Sequence[Form]
    metrics: Mapping[str, Metric]

    def item(self, record: Record) -> Item:
        """The question in a line of the file; what is missing, of another kind or out of range is named."""
        form = next((form for form in self.forms if next(iter(form.fields)) in record), self.forms[-1])
        for field, kind in form.fields.items():
            if field not in record:
                wanted = ", or ".join(" ".join(form.fields) for form in self.forms)
                raise DataError(f"no '{field}' among {', '.join(map(repr, record)) or 'nothing'}: give {wanted}")
            if not kind.holds(record[field]):
                raise DataError(f"'{field}' is {json.dumps(record[field]):.60}: give {kind.wanted}")
        item = form.read(record)
        if not 0 <= item.gold < len(item.pairs):
            raise DataError(f"the right choice is number {item.gold} of {len(item.pairs)}, counted from 0")
        if not all(item.lengths):
            raise DataError("a choice is empty")
        return item


def _after(context: str, choices: Sequence[str], gold: int) -> Item:
    """Choices that go on from one context."""
    return Item(tuple((context, f" {choice}") for choice in choices), gold, tuple(map(len, choices)))


def _hellaswag(record: Record) -> Item:
    context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return _after(_plain(context), [_plain(ending) for ending in record["endings"]], int(record["label"]))


def _plain(text: str) -> str:
    """Without the marks that WikiHow pages left: a title ends a sentence, other brackets go."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _short(record: Record) -> Item:
    return _after(record["query"], record["choices"], record["gold"])


def _arc(record: Record) -> Item:
    labels, answer = record["choices"]["label"], record["answerKey"]
    if answer not in labels:
        raise DataError(f"'answerKey' is {answer!r:.60}: give one of the labels, {', '.join(labels):.60}")
    return _after(f"Question: {record['question']}\nAnswer:", record["choices"]["text"], labels.index(answer))


def _piqa_short(record: Record) -> Item:
    return _after(f"{record['query']}Answer:", record["choices"], record["gold"])


def _piqa(record: Record) -> Item:
    return _after(f"Question: {record['goal']}\nAnswer:", [record["sol1"], record["sol2"]], record["label"])


def _either(contexts: Sequence[str], rest: str, gold: int) -> Item:
    """The rest of a sentence is scored after either name: which of them makes it likelier."""
    return Item(tuple((context, f" {rest}") for context in contexts), gold, (len(rest),) * len(contexts))


def _winogrande_short(record: Record) -> Item:
    return _either(record["context_options"], record["continuation"], record["gold"])


def _winogrande(record: Record) -> Item:
    before, _, rest = record["sentence"].partition("_")
    return _either([before + record["option1"], before + record["option2"]], rest.strip(), int(record["answer"]) - 1)


def _lambada_short(record: Record) -> Item:
    return _after(record["context"], [record["continuation"]], 0)


def _lambada(record: Record) -> Item:
    """The last word of a passage."""
    context, _, word = record["text"].rpartition(" ")
    return _after(context, [word], 0)


SHORT = {"query": TEXT, "choices": TEXTS, "gold": NUMBER}
ARC = (Form(SHORT, _short), Form({"question": TEXT, "choices": LABELLED, "answerKey": TEXT}, _arc))
HELLASWAG = (
    Form(
        {"activity_label": TEXT, "ctx_a": TEXT, "ctx_b": TEXT, "endings": TEXTS, "label": NUMBER_OR_DIGITS}, _hellaswag
    ),
)
LAMBADA = (Form({"context": TEXT, "continuation": TEXT}, _lambada_short), Form({"text": TEXT}, _lambada))
PIQA = (Form(SHORT, _piqa_short), Form({"goal": TEXT, "sol1": TEXT, "sol2": TEXT, "label": NUMBER}, _piqa))
WINOGRANDE = (
    Form({"context_options": TEXTS, "continuation": TEXT, "gold": NUMBER}, _winogrande_short),
    Form({"sentence": SENTENCE, "option1": TEXT, "option2": TEXT, "answer": ONE_OR_TWO}, _winogrande),
)

TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("arc_challenge", "arc_challenge_test", ARC, CHOICE),
        Task("arc_easy", "arc_easy_test", ARC, CHOICE),
        Task("hellaswag", "hellaswag_val", HELLASWAG, CHOICE),
        Task("lambada", "lambada_openai_test", LAMBADA, {"acc": exact, "perplexity": perplexity_per_item}),
        Task("piqa", "piqa_val", PIQA, CHOICE),
        Task("winogrande", "winogrande_val", WINOGRANDE, {"acc": accuracy}),
    )
}
"""Every task by its name."""
