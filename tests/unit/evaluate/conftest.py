"""A small random model with a byte-level tokenizer."""

from __future__ import annotations

import pytest
import torch

from whimbrel.evaluate import Scorer
from whimbrel.models import GPT, GPTConfig
from whimbrel.tokenization import train_tokenizer


@pytest.fixture(scope="session")
def scorer(shakespeare: str) -> Scorer:
    """An untrained model with a context of 64 tokens."""
    tokenizer = train_tokenizer([shakespeare[:20_000]], 300)
    torch.manual_seed(0)
    shape = {"num_layers": 2, "embd_size": 32, "num_heads": 2, "embd_init_std": 0.5, "init_std": 0.2}
    model = GPT(GPTConfig(context_length=64, vocab_size=tokenizer.vocab_size, logit_softcap=15.0, **shape))
    return Scorer(model, tokenizer, tokenizer.eot_id)
