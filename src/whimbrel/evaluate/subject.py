"""The model under test: weights, the tokenizer that belongs to them, and the token that opens a text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from whimbrel.base.errors import DataError
from whimbrel.base.progress import Progress
from whimbrel.evaluate.scoring import Pair, Score, score
from whimbrel.model_io import load
from whimbrel.models import GPT
from whimbrel.tokenization import Tokenizer

__all__ = ["Subject"]


@dataclass(frozen=True, slots=True)
class Subject:
    """Scores text. Text becomes tokens as lm-eval makes them, so that likelihoods are comparable."""

    model: GPT
    tokenizer: Tokenizer
    opener_id: int
    """The token before the first of a text: the beginning-of-text token, else the end-of-text token."""
    parse_special: bool = True
    """Whether special tokens in a text are parsed, as lm-eval does, or read as plain text."""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        quantize: str | None = None,
        parse_special: bool = True,
    ) -> Subject:
        """What `load_model` takes, with the tokenizer that lies beside it unless another is given."""
        loaded = load(path, tokenizer=tokenizer, device=device, dtype=dtype, quantize=quantize)
        return cls(loaded.model, loaded.tokenizer, loaded.generation_config.bos_token_id, parse_special)

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """Context and continuation in tokens, cut where the tokens of the context alone end.

        Both are encoded as one text, since a tokenizer may join what stands at the seam. Spaces that end a context are
        moved to the continuation, where they belong to its first word. Nothing before a continuation is the opener.
        """
        moved = [(context.rstrip(), context[len(context.rstrip()) :] + text) for context, text in texts]
        contexts = self._encode([context for context, _ in moved], special=True)
        wholes = self._encode([context + text for context, text in moved], special=True)
        alone = iter(self._encode([text for context, text in moved if not context], special=False))
        pairs = [
            Pair(before, whole[len(before) :]) if context else Pair([self.opener_id], next(alone))
            for (context, _), before, whole in zip(moved, contexts, wholes, strict=True)
        ]
        for (context, text), pair in zip(texts, pairs, strict=True):
            if not pair.continuation:
                raise DataError(f"no token of {text!r} is its own after {context[-40:]!r}: begin it with a space")
        return pairs

    def prompt(self, text: str) -> list[int]:
        """A text to go on from, opened as the tokenizer's file says; nothing is the opener."""
        [ids] = self._encode([text], special=True)
        return ids or [self.opener_id]

    def rolling(self, texts: Sequence[str]) -> list[Pair]:
        """Whole texts after the opener."""
        return [Pair([self.opener_id], ids) for ids in self._encode(texts, special=False)]

    def score(
        self, pairs: Sequence[Pair], *, batch_size: int | None = None, progress: Progress | None = None
    ) -> list[Score]:
        """How likely the model holds each continuation to be."""
        return score(self.model, pairs, batch_size=batch_size, progress=progress)

    def _encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        encoded = self.tokenizer.encode_prompts(texts, parse_special=self.parse_special, add_special_tokens=special)
        # A chat template may have written the opener already.
        return [ids[1:] if ids[:2] == [self.opener_id] * 2 else ids for ids, _ in encoded]
