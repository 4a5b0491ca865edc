"""Model directories in and out: `load_model`, `save_model`."""

from whimbrel.artifacts.directory import SpecialTokens, load_model, load_weights, save_model, special_tokens

__all__ = ["SpecialTokens", "load_model", "load_weights", "save_model", "special_tokens"]
