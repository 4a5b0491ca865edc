"""Tasks from their files to numbers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from whimbrel.base.errors import ConfigError
from whimbrel.base.files import sha256_file
from whimbrel.base.progress import NoProgress, Progress
from whimbrel.evaluate.files import find_file, find_task, read_items
from whimbrel.evaluate.metrics import Estimate, Item
from whimbrel.evaluate.scoring import Score, is_cut
from whimbrel.evaluate.subject import Subject
from whimbrel.evaluate.tasks import Task

__all__ = ["TaskResult", "evaluate_items", "evaluate_tasks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What a model made of a task."""

    metrics: Mapping[str, Estimate]
    items: int
    cut: int
    """Choices whose context was too long for the model and lost its beginning."""
    items_sha256: str
    """Of the questions as they were asked: equal for results that may be compared."""
    file: str
    file_sha256: str


def evaluate_tasks(
    subject: Subject,
    tasks: Sequence[str],
    data: str | os.PathLike[str] | None = None,
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> dict[str, TaskResult]:
    """Results by the names of tasks, whose files lie in `data`; all are found before the first is begun."""
    if not tasks:
        raise ConfigError("no task is named: name one at least")
    found = {name: (find_task(name), find_file(find_task(name), data)) for name in tasks}
    read = {name: read_items(task, path, limit) for name, (task, path) in found.items()}
    results = {}
    for name, (task, path) in found.items():
        metrics, cut = evaluate_items(subject, task, read[name], batch_size=batch_size, progress=progress)
        results[name] = TaskResult(
            metrics=metrics,
            items=len(read[name]),
            cut=cut,
            items_sha256=_digest(read[name]),
            file=path.name,
            file_sha256=sha256_file(path),
        )
    return results


def evaluate_items(
    subject: Subject,
    task: Task,
    items: Sequence[Item],
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Estimate], int]:
    """The metrics of a task on these questions, and how many contexts were cut."""
    shown, length = progress or NoProgress(), subject.model.config.context_length
    pairs = subject.pairs([pair for item in items for pair in item.pairs])
    shown.start(sum(min(length, len(pair.context) + len(pair.continuation) - 1) for pair in pairs), "tokens")
    try:
        scores = iter(subject.score(pairs, batch_size=batch_size, progress=shown))
        shown.finish()
    finally:
        shown.close()
    answered = list(_answers(items, scores))
    metrics = {
        name: metric.combine([metric.judge(item, answers) for item, answers in answered])
        for name, metric in task.metrics.items()
    }
    return metrics, sum(is_cut(pair, length) for pair in pairs)


def _answers(items: Sequence[Item], scores: Iterator[Score]) -> Iterator[tuple[Item, list[Score]]]:
    """Each question with the scores of its choices."""
    for item in items:
        yield item, [next(scores) for _ in item.pairs]


def _digest(items: Sequence[Item]) -> str:
    return hashlib.sha256(json.dumps([(item.pairs, item.gold) for item in items]).encode()).hexdigest()
