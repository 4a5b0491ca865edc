"""The bundled questions as lm-eval reads them, and its task definitions pointed at local files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whimbrel.evaluate import TASKS

TASK_FILES = {
    "arc_challenge": "arc/arc_challenge",
    "arc_easy": "arc/arc_easy",
    "hellaswag": "hellaswag/hellaswag",
    "lambada": "lambada/lambada_openai",
    "piqa": "piqa/piqa",
    "winogrande": "winogrande/default",
}


def records(fixtures: Path, name: str) -> list[dict[str, Any]]:
    text = (fixtures / "eval" / f"{TASKS[name].file}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def published(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """Convert a record from the short form to the published form, which lm-eval reads."""
    if name.startswith("arc"):
        labels = list("ABCDE"[: len(record["choices"])])
        question = record["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        choices = {"text": record["choices"], "label": labels}
        return {"question": question, "choices": choices, "answerKey": labels[record["gold"]]}
    if name == "piqa":
        goal = record["query"].removeprefix("Question: ").removesuffix("\n")
        return {"goal": goal, "sol1": record["choices"][0], "sol2": record["choices"][1], "label": record["gold"]}
    if name == "lambada":
        return {"text": f"{record['context']} {record['continuation']}"}
    if name == "winogrande":
        first, second = record["context_options"]
        same = next(number for number, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1)
        cut = first.rfind(" ", 0, same) + 1
        sentence = f"{first[:cut]}_ {record['continuation']}"
        return {
            "sentence": sentence,
            "option1": first[cut:],
            "option2": second[cut:],
            "answer": str(record["gold"] + 1),
        }
    return record


def write_spec(path: Path, task_file: str, files: Mapping[str, Path], **changes: Any) -> str:
    """Write a task definition that includes one of lm-eval, with local files as the splits; returns its path."""
    import lm_eval

    task_config = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / f"{task_file}.yaml"),
        "task": path.stem,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(file) for split, file in files.items()}},
        **changes,
    }
    path.write_text(json.dumps(task_config))  # JSON is YAML
    return str(path)


def arguments(sample: dict[str, Any]) -> list[list[str]]:
    table = sample["arguments"]
    if isinstance(table, dict):
        return [[choice["arg_0"], choice["arg_1"]] for choice in table.values()]
    return list(table)
