"""A small model to serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from whimbrel.generate import Engine, EngineConfig
from whimbrel.models import GPT, GPTConfig
from whimbrel.text import load_tokenizer

if TYPE_CHECKING:
    from whimbrel.serve.served import Served


@pytest.fixture(scope="session")
def served() -> Served:
    """Random weights, large enough that the model does not say the same word for ever."""
    from whimbrel.serve.served import Served

    torch.manual_seed(0)
    size = {"context_length": 128, "num_layers": 1, "embd_size": 16, "num_heads": 2}
    model = GPT(GPTConfig(**size, tied_head=False, init_std=0.3, embd_init_std=0.3)).eval()
    return Served(model=model, tokenizer=load_tokenizer("gpt2"), name="tiny", stop_ids=frozenset({50256}))


@pytest.fixture
def engine(served: Served) -> Engine:
    return Engine(served.model, EngineConfig(num_pages=256, max_batch=16))
