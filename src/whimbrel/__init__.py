"""Train, fine-tune, quantize and serve language models on the hardware you have.

`import whimbrel` is cheap: torch and the packages below are imported when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_MODULES = {
    "GPT": "whimbrel.models",
    "GPTConfig": "whimbrel.models",
    "LLM": "whimbrel.inference",
    "Trainer": "whimbrel.train",
    "TrainingArguments": "whimbrel.train",
    "generate": "whimbrel.inference",
    "load_model": "whimbrel.model_io",
    "load_tokenizer": "whimbrel.model_io",
    "save_model": "whimbrel.model_io",
}


def __getattr__(name: str) -> Any:
    if name == "train":  # a package, not a name inside one
        return import_module("whimbrel.train")
    if name not in _MODULES:
        raise AttributeError(f"module 'whimbrel' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
