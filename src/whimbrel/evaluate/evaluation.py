"""Evaluating a model on tasks, and the results as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import whimbrel
from whimbrel.base.errors import ConfigError
from whimbrel.base.files import atomic_file, sha256_file
from whimbrel.base.progress import NoProgress, Progress
from whimbrel.evaluate.generation import GenerationOptions, evaluate_answers, generate_answers
from whimbrel.evaluate.prompts import PromptOptions, Questions, format_item, read_questions
from whimbrel.evaluate.records import Item
from whimbrel.evaluate.scoring import Score, Scorer, is_truncated
from whimbrel.evaluate.tasks import ChoiceTask, Estimate, GenerativeTask, find_file, find_task, generative_task
from whimbrel.evaluate.text_perplexity import TextResult

__all__ = [
    "TaskQuestions",
    "TaskResult",
    "evaluate_items",
    "evaluate_questions",
    "evaluate_tasks",
    "read_tasks",
    "results_to_dict",
    "write_results",
]

TEXT_METRICS = ("bits_per_byte", "bits_per_token", "perplexity", "documents", "tokens", "bytes", "loglikelihood")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """Metrics of a task, and what is needed to compare them with other results."""

    metrics: Mapping[str, Estimate]
    items: int
    truncated: int
    """Number of choices whose context was truncated to fit into the model's context."""
    items_sha256: str
    """Hash of the formatted prompts and answers; results with equal hashes are comparable."""
    file: str
    file_sha256: str
    shots: int
    """Number of few-shot examples."""
    shots_file: str | None
    samples: Sequence[Mapping[str, Any]]
    """Each item with its prompt, the scores or the generated answer, and the value of each metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskQuestions:
    """A task whose files have been read."""

    task: ChoiceTask | GenerativeTask
    path: Path
    questions: Questions


def read_tasks(
    tasks: Sequence[str],
    data: str | os.PathLike[str] | None = None,
    *,
    files: Sequence[str | os.PathLike[str]] = (),
    prompts: PromptOptions | None = None,
    limit: int | None = None,
) -> dict[str, TaskQuestions]:
    """Read the files of tasks by name, in the directory `data`, and `files` of questions with generated answers.

    Needs no model, so that errors in files appear before it is loaded.
    """
    if not tasks and not files:
        raise ConfigError("expected at least one task, got none")
    named: dict[str, tuple[ChoiceTask | GenerativeTask, Path]] = {}
    for name in tasks:
        task = find_task(name)
        named[name] = task, find_file(task, data)
    for file in files:
        named[str(file)] = generative_task(Path(file)), Path(file)
    prompts = prompts or PromptOptions()
    return {
        name: TaskQuestions(task=task, path=path, questions=read_questions(task, path, prompts, limit))
        for name, (task, path) in named.items()
    }


def evaluate_tasks(
    scorer: Scorer,
    tasks: Sequence[str],
    data: str | os.PathLike[str] | None = None,
    *,
    files: Sequence[str | os.PathLike[str]] = (),
    prompts: PromptOptions | None = None,
    generation: GenerationOptions | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> dict[str, TaskResult]:
    """Evaluate tasks by name, and `files` of questions; see `read_tasks`. All files are read before the first one."""
    questions = read_tasks(tasks, data, files=files, prompts=prompts, limit=limit)
    return evaluate_questions(
        scorer, questions, prompts=prompts, generation=generation, batch_size=batch_size, progress=progress
    )


def evaluate_questions(
    scorer: Scorer,
    tasks: Mapping[str, TaskQuestions],
    *,
    prompts: PromptOptions | None = None,
    generation: GenerationOptions | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> dict[str, TaskResult]:
    """Evaluate tasks whose files have been read; `prompts` are those they were read with."""
    prompts, generation = prompts or PromptOptions(), generation or GenerationOptions()
    template = scorer.chat_template if prompts.chat else None
    results = {}
    for name, each in tasks.items():
        task, questions = each.task, each.questions
        formatted = [
            format_item(task, item, examples, template, multiturn=prompts.multiturn)
            for item, examples in zip(questions.items, questions.examples, strict=True)
        ]
        if isinstance(task, GenerativeTask):
            stops = (*task.stop,) if template is None else (*task.chat_stop, *template.stop_strings)
            answers = generate_answers(
                scorer,
                [item.pairs[0][0] for item in formatted],
                stops if generation.stop is None else generation.stop,
                max_new_tokens=generation.max_new_tokens,
                batch_size=batch_size,
                progress=progress,
            )
            metrics, samples = evaluate_answers(task, questions.items, answers)
            samples = [{"prompt": item.pairs[0][0], **sample} for item, sample in zip(formatted, samples, strict=True)]
            truncated = sum(answer.truncated for answer in answers)
        else:
            scored, truncated = _score_items(scorer, formatted, batch_size, progress)
            metrics, samples = _aggregate(task, formatted, scored), _samples(task, formatted, scored)
        results[name] = TaskResult(
            metrics=metrics,
            items=len(formatted),
            truncated=truncated,
            items_sha256=_digest(formatted),
            file=each.path.name,
            file_sha256=sha256_file(each.path),
            shots=questions.shots,
            shots_file=None if questions.shots_file is None else questions.shots_file.name,
            samples=samples,
        )
    return results


def evaluate_items(
    scorer: Scorer,
    task: ChoiceTask,
    items: Sequence[Item],
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Estimate], int]:
    """The metrics of a multiple-choice task on these items, and the number of truncated contexts."""
    scores, truncated = _score_items(scorer, items, batch_size, progress)
    return _aggregate(task, items, scores), truncated


def _score_items(
    scorer: Scorer, items: Sequence[Item], batch_size: int | None, progress: Progress | None
) -> tuple[list[list[Score]], int]:
    """The scores of the choices of each item, and the number of truncated contexts."""
    progress, length = progress or NoProgress(), scorer.model.config.context_length
    pairs = scorer.encode_pairs([pair for item in items for pair in item.pairs])
    progress.start(sum(min(length, len(pair.context) + len(pair.continuation) - 1) for pair in pairs), "tokens")
    try:
        scores = iter(scorer.score(pairs, batch_size=batch_size, progress=progress))
        progress.finish()
    finally:
        progress.close()
    scored = [list(islice(scores, len(item.pairs))) for item in items]
    return scored, sum(is_truncated(pair, length) for pair in pairs)


def _aggregate(task: ChoiceTask, items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> dict[str, Estimate]:
    return {
        name: metric.aggregate([metric.evaluate(item, each) for item, each in zip(items, scores, strict=True)])
        for name, metric in task.metrics.items()
    }


def _samples(task: ChoiceTask, items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> list[dict[str, Any]]:
    return [
        {
            "choices": [
                {"context": context, "continuation": text, "loglikelihood": score, "is_greedy": is_greedy}
                for (context, text), (score, is_greedy) in zip(item.pairs, item_scores, strict=True)
            ],
            "gold": item.gold,
            **{name: metric.evaluate(item, item_scores) for name, metric in task.metrics.items()},
        }
        for item, item_scores in zip(items, scores, strict=True)
    ]


def _digest(items: Sequence[Item]) -> str:
    return hashlib.sha256(json.dumps([(item.pairs, item.gold) for item in items]).encode()).hexdigest()


def results_to_dict(
    scorer: Scorer,
    name: str,
    *,
    tasks: Mapping[str, TaskResult],
    texts: Mapping[str, TextResult],
    settings: Mapping[str, Any],
    log_samples: bool = False,
) -> dict[str, Any]:
    """The results with everything needed to interpret and reproduce them: model, settings, data hashes, versions.

    `log_samples` includes every item.
    """
    model = scorer.model
    return {
        "model": {
            "name": name,
            "parameters": model.num_parameters(),
            "context_length": model.config.context_length,
            "dtype": str(model.token_embedding.weight.dtype).removeprefix("torch."),
            "tokenizer": scorer.tokenizer.fingerprint,
        },
        "settings": dict(settings) | {"device": str(model.token_embedding.weight.device)},
        "tasks": {name: _task_to_dict(result, log_samples) for name, result in tasks.items()},
        "texts": {name: {metric: getattr(result, metric) for metric in TEXT_METRICS} for name, result in texts.items()},
        "versions": {
            "whimbrel": whimbrel.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def write_results(path: str | os.PathLike[str], results: Mapping[str, Any]) -> None:
    """Write results as JSON, atomically."""
    with atomic_file(Path(path), "w") as file:
        file.write(json.dumps(results, indent=2) + "\n")


def _task_to_dict(result: TaskResult, log_samples: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, estimate in result.metrics.items():
        values |= {name: estimate.value, f"{name}_stderr": estimate.stderr}
    return values | {
        "items": result.items,
        "truncated": result.truncated,
        "items_sha256": result.items_sha256,
        "file": result.file,
        "file_sha256": result.file_sha256,
        "shots": result.shots,
        "shots_file": result.shots_file,
        **({"samples": list(result.samples)} if log_samples else {}),
    }
