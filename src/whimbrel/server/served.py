"""The model that is served, with all that turns a client's words into tokens and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from whimbrel.model_io import (
    SpecialTokens,
    generation_settings,
    load_model,
    model_directory,
    model_tokenizer,
    special_tokens,
)
from whimbrel.models import GPT
from whimbrel.server.prompts import PromptReader
from whimbrel.server.tokens import TokenTexts
from whimbrel.tokenization import Tokenizer
from whimbrel.tokenization.chat import PLAIN, ChatTemplate, load_chat_template

__all__ = ["Served", "load_served"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model and what is known of its directory."""

    model: GPT
    tokenizer: Tokenizer
    name: str
    """What clients call it."""
    created: int = 0
    """When it was written, in seconds since 1970."""
    template: ChatTemplate = PLAIN
    """How a conversation becomes text."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a text."""
    bos_id: int | None = None
    """The token that replaces an empty prompt; default: the tokenizer's BOS token."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """How tokens are drawn where a request does not say."""
    texts: TokenTexts = field(init=False)
    """The text of single tokens."""
    reader: PromptReader = field(init=False)
    """What clients send, as tokens."""

    def __post_init__(self) -> None:
        texts = TokenTexts(self.tokenizer)
        object.__setattr__(self, "texts", texts)
        bos_id = self.tokenizer.bos_id if self.bos_id is None else self.bos_id
        reader = PromptReader(self.tokenizer, texts, self.template, self.model.config.vocab_size, bos_id)
        object.__setattr__(self, "reader", reader)


def load_served(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    device: torch.device | None = None,
    weights: str | None = None,
) -> Served:
    """A run's newest model, or that of a directory or a llama2.c file, ready to be served."""
    source = model_directory(path)
    words = model_tokenizer(source, tokenizer)
    model = load_model(source, device=device, weights=weights).eval()
    folder = source.is_dir()
    settings = generation_settings(source) if folder else {}
    special = special_tokens(source) if folder else SpecialTokens()
    return Served(
        model=model,
        tokenizer=words,
        name=name or Path(path).absolute().name,
        created=int((source / "config.json" if folder else source).stat().st_mtime),
        template=(load_chat_template(source) if folder else None) or PLAIN,
        stop_ids=frozenset(special.eos_ids or (words.eot_id,)),
        bos_id=special.opener(words),
        defaults={key: value for key, value in settings.items() if key != "max_new_tokens"},
    )
