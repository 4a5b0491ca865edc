"""A small Llama and its model directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from whimbrel.model_io import save_model
from whimbrel.models import GPT, GPTConfig

LLAMA = {"norm": "rms", "position": "rope", "activation": "silu", "gated_mlp": True, "bias": "none", "tied_head": False}


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(context_length=16, vocab_size=50, num_layers=2, embd_size=16, num_heads=2, **LLAMA))


@pytest.fixture
def saved(model: GPT, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "model")
    return tmp_path / "model"
