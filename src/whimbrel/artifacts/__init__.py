"""Model directories in and out: `load_model`, `load_tokenizer`, `save_model`, `finalize_model`."""

from whimbrel.artifacts.directory import (
    SpecialTokens,
    check_tokenizer,
    generation_settings,
    load_model,
    load_weights,
    model_tokenizer,
    save_model,
    special_tokens,
)
from whimbrel.artifacts.finalize import finalize_model
from whimbrel.artifacts.measure import Finalized, Measured
from whimbrel.artifacts.quantized import weight_state
from whimbrel.artifacts.sources import load_tokenizer, model_directory

__all__ = [
    "Finalized",
    "Measured",
    "SpecialTokens",
    "check_tokenizer",
    "finalize_model",
    "generation_settings",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "model_directory",
    "model_tokenizer",
    "save_model",
    "special_tokens",
    "weight_state",
]
