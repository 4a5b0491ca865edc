"""Text to token ids and back: one `Tokenizer`, one file form (`tokenizer.json`), GPT-2 inside the package. No torch."""

from whimbrel.text.tokenizer import Tokenizer, load_tokenizer
from whimbrel.text.training import train_tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "train_tokenizer"]
