"""Model directories in and out: `load_model`, `load_tokenizer`, `save_model`, `finalize_model`."""

from whimbrel.artifacts.directory import (
    SpecialTokens,
    generation_settings,
    load_model,
    load_weights,
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
    "finalize_model",
    "generation_settings",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "model_directory",
    "save_model",
    "special_tokens",
    "weight_state",
]
