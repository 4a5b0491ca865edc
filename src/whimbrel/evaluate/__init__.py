"""Evaluation: multiple-choice tasks, perplexity of text, and the lm-eval adapter (`evaluate.lm_eval`)."""

from whimbrel.evaluate.evaluation import TaskResult, evaluate_items, evaluate_tasks
from whimbrel.evaluate.scoring import Pair, Score, Scorer, score
from whimbrel.evaluate.tasks import TASKS, Estimate, Item, Task
from whimbrel.evaluate.text_perplexity import (
    TextResult,
    held_out_evaluation,
    is_shard_directory,
    perplexity,
    shard_perplexity,
)

__all__ = [
    "TASKS",
    "Estimate",
    "Item",
    "Pair",
    "Score",
    "Scorer",
    "Task",
    "TaskResult",
    "TextResult",
    "evaluate_items",
    "evaluate_tasks",
    "held_out_evaluation",
    "is_shard_directory",
    "perplexity",
    "score",
    "shard_perplexity",
]
