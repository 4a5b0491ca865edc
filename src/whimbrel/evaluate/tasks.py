"""The tasks: how a line of each file becomes a question, worded as lm-eval words it, and what is measured on it.

A line may be as the dataset was published, or in the short form {query, choices, gold}.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whimbrel.base.errors import DataError
from whimbrel.evaluate.metrics import Item, Metric, accuracy, exact, normalised_accuracy, perplexity_per_item

__all__ = ["TASKS", "Task"]

Record = Mapping[str, Any]
CHOICE = {"acc": accuracy, "acc_norm": normalised_accuracy}


@dataclass(frozen=True, slots=True)
class Task:
    """A set of questions."""

    name: str
    file: str
    """The name of its file, before `.jsonl` or `.jsonl.gz`."""
    read: Callable[[Record], Item]
    metrics: Mapping[str, Metric]

    def item(self, record: Record) -> Item:
        """The question in a line of the file; what is missing or out of range is named."""
        try:
            item = self.read(record)
        except KeyError as error:
            raise DataError(f"no {error} among {', '.join(map(repr, record))}") from error
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise DataError(f"not as {self.name} is: {error}") from error
        if not isinstance(item.gold, int):
            raise DataError(f"the right choice is {item.gold!r}: give its number, counted from 0")
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


def _arc(record: Record) -> Item:
    if "query" in record:
        return _after(record["query"], record["choices"], record["gold"])
    choices = record["choices"]
    gold = choices["label"].index(record["answerKey"])
    return _after(f"Question: {record['question']}\nAnswer:", choices["text"], gold)


def _piqa(record: Record) -> Item:
    if "query" in record:
        return _after(f"{record['query']}Answer:", record["choices"], record["gold"])
    return _after(f"Question: {record['goal']}\nAnswer:", [record["sol1"], record["sol2"]], record["label"])


def _winogrande(record: Record) -> Item:
    """The rest of the sentence is scored after either name: which of them makes it likelier."""
    if "sentence" in record:
        before, _, rest = record["sentence"].partition("_")
        contexts = [before + record["option1"], before + record["option2"]]
        rest, gold = rest.strip(), ("1", "2").index(record["answer"])
    else:
        contexts, rest, gold = record["context_options"], record["continuation"], record["gold"]
    return Item(tuple((context, f" {rest}") for context in contexts), gold, (len(rest),) * len(contexts))


def _lambada(record: Record) -> Item:
    """The last word of a passage."""
    if "text" in record:
        context, _, word = record["text"].rpartition(" ")
    else:
        context, word = record["context"], record["continuation"]
    return _after(context, [word], 0)


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("arc_challenge", "arc_challenge_test", _arc, CHOICE),
        Task("arc_easy", "arc_easy_test", _arc, CHOICE),
        Task("hellaswag", "hellaswag_val", _hellaswag, CHOICE),
        Task("lambada", "lambada_openai_test", _lambada, {"acc": exact, "perplexity": perplexity_per_item}),
        Task("piqa", "piqa_val", _piqa, CHOICE),
        Task("winogrande", "winogrande_val", _winogrande, {"acc": accuracy}),
    )
}
"""Every task by its name."""
