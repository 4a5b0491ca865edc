"""Train, quantize, evaluate and serve language models on the hardware you have.

`import whimbrel` is cheap: torch and the packages below are imported when a name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whimbrel.base import lazy_exports

if TYPE_CHECKING:
    from whimbrel import train
    from whimbrel.inference import LLM, generate
    from whimbrel.model_io import load_model, load_tokenizer, save_model
    from whimbrel.models import GPT, GPTConfig
    from whimbrel.train import Trainer, TrainingArguments

__all__ = [
    "GPT",
    "LLM",
    "GPTConfig",
    "Trainer",
    "TrainingArguments",
    "__version__",
    "generate",
    "load_model",
    "load_tokenizer",
    "save_model",
    "train",
]

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "inference": ["LLM", "generate"],
        "model_io": ["load_model", "load_tokenizer", "save_model"],
        "models": ["GPT", "GPTConfig"],
        "train": ["Trainer", "TrainingArguments"],
    },
)
