"""Model directories in and out: `load_model`, `load_tokenizer`, `save_model`."""

from whimbrel.artifacts.directory import SpecialTokens, load_model, load_weights, save_model, special_tokens
from whimbrel.artifacts.quantized import weight_state
from whimbrel.artifacts.sources import load_tokenizer, model_directory

__all__ = [
    "SpecialTokens",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "model_directory",
    "save_model",
    "special_tokens",
    "weight_state",
]
