"""How good a model is: multiple-choice tasks, perplexity on any text, and (`evaluate.lm_eval`) the lm-eval adapter."""

from whimbrel.evaluate.metrics import Estimate, Item
from whimbrel.evaluate.run import TaskResult, evaluate_items, evaluate_tasks
from whimbrel.evaluate.scoring import Pair, Score, score
from whimbrel.evaluate.subject import Subject
from whimbrel.evaluate.tasks import TASKS, Task
from whimbrel.evaluate.texts import TextResult, perplexity, shard_perplexity

__all__ = [
    "Estimate",
    "Item",
    "Pair",
    "Score",
    "Subject",
    "TASKS",
    "Task",
    "TaskResult",
    "TextResult",
    "evaluate_items",
    "evaluate_tasks",
    "perplexity",
    "score",
    "shard_perplexity",
]
