"""Learn a byte-level BPE from text, laid out as GPT-2's: bytes, merges in the order learned, end-of-text last."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tokenizers import AddedToken, models, pre_tokenizers, trainers

from whimbrel.base.errors import ConfigError, DataError
from whimbrel.tokenization.gpt2 import END_OF_TEXT, byte_level_pipeline
from whimbrel.tokenization.tokenizer import MAX_VOCABULARY, Tokenizer

__all__ = ["train_tokenizer"]

SMALLEST_VOCABULARY = 257
"""The 256 bytes and end-of-text."""
LARGEST_FREQUENCY = (1 << 63) - 1


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2) -> Tokenizer:
    """A tokenizer of `vocab_size` ids learned from `texts`; fewer where no pair occurs `min_frequency` times."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"vocab_size={vocab_size} is too small: the 256 bytes and end-of-text need {SMALLEST_VOCABULARY}"
        )
    if vocab_size > MAX_VOCABULARY:
        raise ConfigError(f"vocab_size={vocab_size} is too large: at most {MAX_VOCABULARY:,} ids can be learned")
    if not 1 <= min_frequency <= LARGEST_FREQUENCY:
        raise ConfigError(f"min_frequency={min_frequency} must be 1 to {LARGEST_FREQUENCY:,} occurrences")
    pipeline = byte_level_pipeline(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    seen = 0

    def counted() -> Iterable[str]:
        nonlocal seen
        for text in texts:
            seen += len(text)
            yield text

    pipeline.train_from_iterator(counted(), trainer)
    if not seen:
        raise DataError("no text to learn a tokenizer from: the source holds no characters")
    pipeline.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    tokenizer = Tokenizer(pipeline, END_OF_TEXT)
    if tokenizer.vocab_size < vocab_size:
        logging.getLogger(__name__).warning(
            "the text holds only %d useful tokens of the %d asked for", tokenizer.vocab_size, vocab_size
        )
    return tokenizer
