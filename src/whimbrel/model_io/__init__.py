"""Model directories in and out: `load_model`, `load_tokenizer`, `save_model`, `finalize_model`."""

from whimbrel.model_io.directory import (
    SpecialTokens,
    check_tokenizer,
    generation_settings,
    load_model,
    load_weights,
    model_tokenizer,
    save_model,
    special_tokens,
)
from whimbrel.model_io.finalize import finalize_model
from whimbrel.model_io.measure import Finalized, Measured
from whimbrel.model_io.quantized import weight_state
from whimbrel.model_io.sources import load_tokenizer, model_directory

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
