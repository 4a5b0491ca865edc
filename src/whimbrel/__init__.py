"""Whimbrel takes raw text to a served language model on the hardware you have.

Importing it is cheap: a public name loads what it needs (torch among it) when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whimbrel.artifacts import load_model, load_tokenizer, save_model
    from whimbrel.generate import generate

__all__ = ["__version__", "generate", "load_model", "load_tokenizer", "save_model"]

__version__ = "0.1.0"

_HOMES = {
    "generate": "whimbrel.generate",
    "load_model": "whimbrel.artifacts",
    "load_tokenizer": "whimbrel.artifacts",
    "save_model": "whimbrel.artifacts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'whimbrel' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
