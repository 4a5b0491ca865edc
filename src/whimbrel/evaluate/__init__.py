"""Evaluation: multiple-choice and generative tasks, perplexity of text, the lm-eval adapter (`evaluate.lm_eval`)."""

from whimbrel.evaluate.evaluation import TaskResult, evaluate_items, evaluate_tasks
from whimbrel.evaluate.generation import GenerationOptions
from whimbrel.evaluate.prompts import PromptOptions
from whimbrel.evaluate.records import Item
from whimbrel.evaluate.scoring import Pair, Score, Scorer, score
from whimbrel.evaluate.tasks import GENERATIVE_TASKS, TASKS, ChoiceTask, Estimate, GenerativeTask, Task
from whimbrel.evaluate.text_perplexity import (
    TextResult,
    held_out_evaluation,
    is_shard_directory,
    perplexity,
    shard_perplexity,
)

__all__ = [
    "GENERATIVE_TASKS",
    "TASKS",
    "ChoiceTask",
    "Estimate",
    "GenerationOptions",
    "GenerativeTask",
    "Item",
    "Pair",
    "PromptOptions",
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
