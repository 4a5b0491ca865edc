"""Prompts as in lm-eval: few-shot examples and chat templates.

The examples of each item are sampled as lm-eval does with its default seeds, so that prompts are equal character by
character.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.evaluate.records import Item, Record
from whimbrel.evaluate.tasks import Task, find_examples, read_task_file
from whimbrel.tokenization import ChatTemplate

__all__ = ["PromptOptions", "Questions", "format_item", "read_questions", "sample_examples"]

SEED = 1234
"""lm-eval's `fewshot_random_seed`."""
ANSWER_DELIMITER, EXAMPLE_DELIMITER = " ", "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How items become prompts."""

    shots: int | None = None
    """Number of few-shot examples. (default: the task's)"""
    shots_data: str | os.PathLike[str] | None = None
    """A file of examples, or a directory of training splits; see `find_examples`."""
    chat: bool = False
    """Render prompts with the model's chat template (lm-eval's `--apply_chat_template`)."""
    multiturn: bool = True
    """With a chat template: few-shot examples are turns of the conversation (lm-eval's `fewshot_as_multiturn`), not
    part of one user message."""

    def __post_init__(self) -> None:
        if self.shots is not None and self.shots < 0:
            raise ConfigError(f"shots: expected at least 0, got {self.shots}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The items of a file, without their prompts' formatting, and the few-shot examples of each."""

    items: Sequence[Item]
    examples: Sequence[Sequence[Item]]
    shots: int
    shots_file: Path | None


def read_questions(task: Task, path: Path, options: PromptOptions, limit: int | None = None) -> Questions:
    """Read the first `limit` items of a file and sample their few-shot examples."""
    shots = task.shots if options.shots is None else options.shots
    if not shots:
        if options.shots_data is not None:
            raise ConfigError(f"expected --shots of at least 1 with --shots-data, got 0 for task {task.name}")
        rows = read_task_file(task, path, limit)
        questions = Questions(items=[item for _, item in rows], examples=[()] * len(rows), shots=0, shots_file=None)
    else:
        examples_path = find_examples(task, path, options.shots_data)
        is_same_file = examples_path.resolve() == path.resolve()
        pool = read_task_file(task, examples_path)
        rows = pool[:limit] if is_same_file else read_task_file(task, path, limit)
        sampled = sample_examples(
            [record for record, _ in rows],
            [record for record, _ in pool],
            shots,
            draw_one_more=is_same_file or task.draws_one_more,
            name=str(examples_path),
        )
        questions = Questions(
            items=[item for _, item in rows],
            examples=[[pool[index][1] for index in indices] for indices in sampled],
            shots=shots,
            shots_file=examples_path,
        )
    _check_conversations(path, questions, options)
    return questions


def _check_conversations(path: Path, questions: Questions, options: PromptOptions) -> None:
    if not options.chat and any(item.history for item in questions.items):
        raise ConfigError(f"{path} has conversations with a system prompt or several turns: add --chat")
    if any(role != "system" for items in questions.examples for item in items for role, _ in item.history):
        raise ConfigError(
            f"{questions.shots_file}: expected single-turn few-shot examples, got several turns: omit --shots"
        )


def sample_examples(
    records: Sequence[Record], pool: Sequence[Record], count: int, *, draw_one_more: bool, name: str
) -> list[list[int]]:
    """Indices into `pool` of the `count` examples of each record, sampled as by lm-eval's `ContextSampler`.

    With `draw_one_more`, an example equal to the record is dropped. `name` names the pool in errors.
    """
    rng, drawn = Random(SEED), count + draw_one_more
    if drawn > len(pool):
        raise DataError(
            f"{name}: expected at least {drawn} examples for {count} per question, got {len(pool)}: pass a smaller "
            "--shots, or more examples with --shots-data"
        )
    sampled = []
    for record in records:
        indices = rng.sample(range(len(pool)), drawn)
        if draw_one_more:
            indices = [index for index in indices if pool[index] != record][:count]
        if len(indices) < count:  # the pool has copies of the record
            others = [index for index, candidate in enumerate(pool) if candidate != record]
            if len(others) < count:
                raise DataError(f"{name}: expected {count} examples different from the question, got {len(others)}")
            indices = rng.sample(others, count)
        sampled.append(indices)
    return sampled


def format_item(
    task: Task, item: Item, examples: Sequence[Item], template: ChatTemplate | None = None, *, multiturn: bool = True
) -> Item:
    """The item with complete prompts as contexts: examples, then the question, rendered with `template` if given."""
    turns = [task.example(example) for example in examples]
    contexts = {context: context for context, _ in item.pairs}
    for context in contexts:
        contexts[context] = (
            _join(turns, context) if template is None else _render(template, item, turns, context, multiturn)
        )
    delimiter = "" if template is None else task.target_delimiter
    pairs = tuple((contexts[context], text.removeprefix(delimiter)) for context, text in item.pairs)
    return replace(item, pairs=pairs)


def _join(turns: Sequence[tuple[str, str]], question: str) -> str:
    return "".join(f"{asked}{ANSWER_DELIMITER}{answer}{EXAMPLE_DELIMITER}" for asked, answer in turns) + question


def _render(
    template: ChatTemplate, item: Item, turns: Sequence[tuple[str, str]], question: str, multiturn: bool
) -> str:
    """The conversation up to the start of the answer: system prompt, examples, earlier messages, question."""
    num_system = int(bool(item.history) and item.history[0][0] == "system")
    messages = list(item.history[:num_system])
    if multiturn:
        for asked, answer in turns:
            messages += [("user", asked), ("assistant", answer)]
    else:
        question = _join(turns, question)
    messages += [*item.history[num_system:], ("user", question)]
    return template.render([{"role": role, "content": content} for role, content in messages])
