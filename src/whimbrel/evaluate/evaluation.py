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
from whimbrel.evaluate.scoring import Scorer, is_truncated
from whimbrel.evaluate.tasks import Estimate, Item, Task, find_file, find_task, read_items
from whimbrel.evaluate.text_perplexity import TextResult

__all__ = ["TaskResult", "evaluate_items", "evaluate_tasks", "results_to_dict", "write_results"]

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


def evaluate_tasks(
    scorer: Scorer,
    tasks: Sequence[str],
    data: str | os.PathLike[str] | None = None,
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> dict[str, TaskResult]:
    """Evaluate tasks by name, with files in the directory `data`; all files are read before the first task starts."""
    if not tasks:
        raise ConfigError("expected at least one task, got none")
    resolved = {name: (find_task(name), find_file(find_task(name), data)) for name in tasks}
    items = {name: read_items(task, path, limit) for name, (task, path) in resolved.items()}
    results = {}
    for name, (task, path) in resolved.items():
        metrics, truncated = evaluate_items(scorer, task, items[name], batch_size=batch_size, progress=progress)
        results[name] = TaskResult(
            metrics=metrics,
            items=len(items[name]),
            truncated=truncated,
            items_sha256=_digest(items[name]),
            file=path.name,
            file_sha256=sha256_file(path),
        )
    return results


def evaluate_items(
    scorer: Scorer,
    task: Task,
    items: Sequence[Item],
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Estimate], int]:
    """The metrics of a task on these items, and the number of truncated contexts."""
    progress, length = progress or NoProgress(), scorer.model.config.context_length
    pairs = scorer.encode_pairs([pair for item in items for pair in item.pairs])
    progress.start(sum(min(length, len(pair.context) + len(pair.continuation) - 1) for pair in pairs), "tokens")
    try:
        scores = iter(scorer.score(pairs, batch_size=batch_size, progress=progress))
        progress.finish()
    finally:
        progress.close()
    scored = [(item, list(islice(scores, len(item.pairs)))) for item in items]
    metrics = {
        name: metric.aggregate([metric.evaluate(item, item_scores) for item, item_scores in scored])
        for name, metric in task.metrics.items()
    }
    return metrics, sum(is_truncated(pair, length) for pair in pairs)


def _digest(items: Sequence[Item]) -> str:
    return hashlib.sha256(json.dumps([(item.pairs, item.gold) for item in items]).encode()).hexdigest()


def results_to_dict(
    scorer: Scorer,
    name: str,
    *,
    tasks: Mapping[str, TaskResult],
    texts: Mapping[str, TextResult],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The results with everything needed to interpret and reproduce them: model, settings, data hashes, versions."""
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
        "tasks": {name: _task_to_dict(result) for name, result in tasks.items()},
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


def _task_to_dict(result: TaskResult) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, estimate in result.metrics.items():
        values |= {name: estimate.value, f"{name}_stderr": estimate.stderr}
    return values | {
        "items": result.items,
        "truncated": result.truncated,
        "items_sha256": result.items_sha256,
        "file": result.file,
        "file_sha256": result.file_sha256,
    }
