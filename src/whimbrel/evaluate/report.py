"""Results as JSON: what was measured, of which model, on what, and with which versions."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import whimbrel
from whimbrel.base.files import atomic_file
from whimbrel.evaluate.run import TaskResult
from whimbrel.evaluate.subject import Subject
from whimbrel.evaluate.texts import TextResult

__all__ = ["results_table", "write_results"]


def results_table(
    subject: Subject,
    name: str,
    *,
    tasks: Mapping[str, TaskResult],
    texts: Mapping[str, TextResult],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """All that is needed to say what a number means, and to measure it again."""
    model = subject.model
    return {
        "model": {
            "name": name,
            "parameters": model.num_parameters(),
            "context_length": model.config.context_length,
            "dtype": str(model.token_embedding.weight.dtype).removeprefix("torch."),
            "tokenizer": subject.tokenizer.fingerprint,
        },
        "settings": dict(settings) | {"device": str(model.token_embedding.weight.device)},
        "tasks": {name: _of_task(result) for name, result in tasks.items()},
        "texts": {name: _of_text(result) for name, result in texts.items()},
        "versions": {
            "whimbrel": whimbrel.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def write_results(path: str | os.PathLike[str], table: Mapping[str, Any]) -> None:
    """Write results, whole or not at all."""
    with atomic_file(Path(path), "w") as file:
        file.write(json.dumps(table, indent=2) + "\n")


def _of_task(result: TaskResult) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, estimate in result.metrics.items():
        values |= {name: estimate.value, f"{name}_stderr": estimate.stderr}
    names = ("items", "cut", "items_sha256", "file", "file_sha256")
    return values | {name: getattr(result, name) for name in names}


def _of_text(result: TextResult) -> dict[str, Any]:
    names = ("bits_per_byte", "bits_per_token", "perplexity", "documents", "tokens", "bytes", "loglikelihood")
    return {name: getattr(result, name) for name in names}
