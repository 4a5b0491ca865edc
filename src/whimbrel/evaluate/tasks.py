"""Tasks: file formats, prompts as in lm-eval, and metrics.

A line of a task file is a record as the dataset was published, or in the short form {query, choices, gold}.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.evaluate.records import (
    LABELED,
    MESSAGES,
    NUMBER,
    NUMBER_OR_DIGITS,
    ONE_OR_TWO,
    SENTENCE,
    SOLUTION,
    SUFFIXES,
    TEXT,
    TEXTS,
    Item,
    Record,
    RecordFormat,
    parse_record,
    read_records,
)
from whimbrel.evaluate.scoring import Score
from whimbrel.models.held_out_loss import perplexity

__all__ = [
    "DATA_ENV_VAR",
    "GENERATIVE_TASKS",
    "TASKS",
    "ChoiceTask",
    "Estimate",
    "GenerativeTask",
    "Metric",
    "Task",
    "find_examples",
    "find_file",
    "find_task",
    "generative_task",
    "mean",
    "read_items",
    "read_task_file",
]

DATA_ENV_VAR = "WHIMBREL_EVAL_DATA"
"""Environment variable with the directory of the task files."""
DEFAULT_DIRECTORY = Path("data", "eval")


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


def mean(values: Sequence[float]) -> Estimate:
    """The mean and its standard error."""
    stderr = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), stderr)


def _perplexity(loglikelihoods: Sequence[float]) -> Estimate:
    """The standard error of the mean is propagated through the exponential to first order."""
    loglikelihood, stderr = mean(loglikelihoods)
    value = perplexity(-loglikelihood)
    return Estimate(value, None if stderr is None else value * stderr)


def _argmax(values: Sequence[float]) -> int:
    """The first index of the maximum."""
    return max(range(len(values)), key=values.__getitem__)


def _is_correct_per_character(item: Item, scores: Sequence[Score]) -> float:
    per_character = [each.loglikelihood / length for each, length in zip(scores, item.lengths, strict=True)]
    return float(_argmax(per_character) == item.gold)


ACCURACY = Metric(lambda item, scores: float(_argmax([each.loglikelihood for each in scores]) == item.gold), mean)
"""The most likely choice is correct."""
NORMALIZED_ACCURACY = Metric(_is_correct_per_character, mean)
"""The choice with the highest log-likelihood per character is correct; does not favor short answers."""
EXACT_MATCH = Metric(lambda item, scores: float(scores[item.gold].is_greedy), mean)
"""Greedy decoding generates the correct answer."""
PERPLEXITY = Metric(lambda item, scores: scores[item.gold].loglikelihood, _perplexity)
"""The exponential of the mean negative log-likelihood per answer (not per token)."""
CHOICE_METRICS = {"acc": ACCURACY, "acc_norm": NORMALIZED_ACCURACY}


# Tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A set of questions."""

    name: str
    file: str
    """The file name without `.jsonl` or `.jsonl.gz`."""
    formats: Sequence[RecordFormat]
    shots: int = 0
    """Default number of few-shot examples."""
    target_delimiter: str = " "
    """What each continuation starts with to separate it from its context; left out after a chat template."""
    draws_one_more: bool = False
    """Whether one example more than needed is drawn even from another file. lm-eval does that if the split of the
    examples has the same name as the test split in the task's config; both are unset if there is no test split."""

    def item(self, record: Record) -> Item:
        """Convert a record; raises DataError for missing or invalid fields."""
        return parse_record(self.formats, record)

    def example(self, item: Item) -> tuple[str, str]:
        """The question and the correct answer, as a few-shot example shows them."""
        context, continuation = item.pairs[item.gold]
        return context, continuation.removeprefix(self.target_delimiter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTask(Task):
    """Answers are scored by their log-likelihood."""

    metrics: Mapping[str, Metric]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerativeTask(Task):
    """Answers are generated and compared with the correct one."""

    filters: Mapping[str, Callable[[str], str]]
    """Metric name -> function that extracts the answer from the generated text."""
    normalize: Callable[[str], str]
    """Applied to the extracted and to the correct answer before they are compared."""
    stop: Sequence[str]
    """Stop strings."""
    chat_stop: Sequence[str]
    """Stop strings after a chat template, in addition to the template's own."""


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


# Generative tasks: extraction and normalization as in lm-eval's gsm8k task

INVALID = "[invalid]"
"""The extracted answer if there is none."""
IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))
"""Removed in this order from the extracted and the correct answer: thousands separators, currency, the solution."""


def _strict_match(text: str) -> str:
    """The first number after ####."""
    match = re.search(r"#### (-?[0-9.,]+)", text)
    return match[1] if match else INVALID


def _flexible_extract(text: str) -> str:
    """The last number."""
    numbers = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)
    return numbers[-1] if numbers else INVALID


def _normalize_number(answer: str) -> str:
    for pattern in IGNORED:
        answer = pattern.sub("", answer)
    return answer.lower()


def _question(prompt: str, answer: str) -> Item:
    return _shared_context(prompt, [answer], 0)


def _conversation(record: Record) -> Item:
    *history, question, answer = ((message["role"], message["content"]) for message in record["messages"])
    return Item(((question[1], f" {answer[1]}"),), 0, (len(answer[1]),), tuple(history))


GSM8K = (
    RecordFormat(
        {"question": TEXT, "answer": SOLUTION},
        lambda record: _question(f"Question: {record['question']}\nAnswer:", record["answer"]),
    ),
)
QUESTIONS = (
    RecordFormat({"messages": MESSAGES}, _conversation),
    RecordFormat(
        {"completion": TEXT, "prompt": TEXT}, lambda record: _question(record["prompt"], record["completion"])
    ),
    RecordFormat({"prompt": TEXT, "answer": TEXT}, lambda record: _question(record["prompt"], record["answer"])),
)

TASKS: Mapping[str, ChoiceTask] = {
    task.name: task
    for task in (
        ChoiceTask(name="arc_challenge", file="arc_challenge_test", formats=ARC, metrics=CHOICE_METRICS),
        ChoiceTask(name="arc_easy", file="arc_easy_test", formats=ARC, metrics=CHOICE_METRICS),
        ChoiceTask(
            name="hellaswag", file="hellaswag_val", formats=HELLASWAG, metrics=CHOICE_METRICS, draws_one_more=True
        ),
        ChoiceTask(
            name="lambada",
            file="lambada_openai_test",
            formats=LAMBADA,
            metrics={"acc": EXACT_MATCH, "perplexity": PERPLEXITY},
            target_delimiter="",  # the space is part of the answer, in few-shot examples and chats too
        ),
        ChoiceTask(name="piqa", file="piqa_val", formats=PIQA, metrics=CHOICE_METRICS, draws_one_more=True),
        ChoiceTask(
            name="winogrande", file="winogrande_val", formats=WINOGRANDE, metrics={"acc": ACCURACY}, draws_one_more=True
        ),
    )
}
"""Multiple-choice tasks by name."""

GENERATIVE_TASKS: Mapping[str, GenerativeTask] = {
    "gsm8k": GenerativeTask(
        name="gsm8k",
        file="gsm8k_test",
        formats=GSM8K,
        shots=5,
        filters={"exact_match_strict": _strict_match, "exact_match_flexible": _flexible_extract},
        normalize=_normalize_number,
        stop=("Question:", "</s>", "<|im_end|>"),
        chat_stop=("Question:", "</s>", "<|im_end|>"),
    )
}
"""Generative tasks by name."""

EXACT_MATCH_TASK = GenerativeTask(
    name="exact_match",
    file="exact_match",
    formats=QUESTIONS,
    filters={"exact_match": str.strip},
    normalize=str.strip,
    stop=("\n\n",),  # ends a few-shot example; lm-eval's default
    chat_stop=(),
)
"""For files of other questions: the text of the answer has to be equal."""


# Files


def find_task(name: str) -> ChoiceTask | GenerativeTask:
    """Raises ConfigError for an unknown name."""
    task = TASKS.get(name) or GENERATIVE_TASKS.get(name)
    if task is None:
        raise ConfigError(f"unknown task '{name}': choose from {', '.join([*TASKS, *GENERATIVE_TASKS])}")
    return task


def generative_task(path: Path) -> GenerativeTask:
    """The task of a file of questions and answers, by the fields of its first record."""
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    if not path.is_file():
        raise DataError(f"no such file: {path}")
    line, record = next(read_records(path), (0, {"prompt": ""}))  # an empty file is rejected when it is read
    if "question" in record:
        return replace(GENERATIVE_TASKS["gsm8k"], name=name, file=name, shots=0)
    if not {"prompt", "completion", "messages"} & record.keys():
        raise DataError(
            f"{path} line {line}: expected fields (question, answer), (prompt, answer), (prompt, completion) or "
            f"(messages), got ({', '.join(record)})"
        )
    return replace(EXACT_MATCH_TASK, name=name, file=name)


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


def find_examples(task: Task, path: Path, shots_data: str | os.PathLike[str] | None = None) -> Path:
    """The file of few-shot examples for the questions in `path`.

    It is `shots_data`, or in that directory the training split (`piqa_train.jsonl`). By default it is the training
    split next to `path`, else `path` itself.
    """
    if shots_data is not None and not Path(shots_data).is_dir():
        return Path(shots_data)
    directory = path.parent if shots_data is None else Path(shots_data)
    names = [f"{task.name}_train{suffix}" for suffix in SUFFIXES]
    found = next((candidate for name in names if (candidate := directory / name).is_file()), None)
    if found is None and shots_data is not None:
        raise DataError(
            f"no examples for task {task.name} in {directory} (--shots-data): expected {' or '.join(names)}"
        )
    return found or path


def read_items(task: Task, path: Path, limit: int | None = None) -> list[Item]:
    """Read the items in a file, at most the first `limit`."""
    return [item for _, item in read_task_file(task, path, limit)]


def read_task_file(task: Task, path: Path, limit: int | None = None) -> list[tuple[Record, Item]]:
    """Read the records in a file with their items, at most the first `limit`."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit: expected at least 1, got {limit}")
    items = []
    for line, record in itertools.islice(read_records(path), limit):
        try:
            items.append((record, task.item(record)))
        except DataError as error:
            raise DataError(f"{path} line {line}: {error}") from error
    if not items:
        raise DataError(f"{path} has no items for task {task.name}")
    return items
