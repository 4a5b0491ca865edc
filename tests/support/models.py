"""Small models of every kind."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from whimbrel.models import GPT, GPTConfig, preset

AnyModel = TypeVar("AnyModel", bound=torch.nn.Module)
SMALL = {
    "context_length": 32,
    "vocab_size": 97,
    "num_layers": 3,
    "embd_size": 32,
    "num_heads": 4,
    "vocab_multiple": 16,
}


def small_preset(name: str, **settings: object) -> GPTConfig:
    """A preset with its sizes reduced."""
    config = preset(name)
    small = {**SMALL, "head_size": None, "mlp_size": None, "num_kv_heads": 2 if config.num_kv_heads else None}
    return replace(config, **small | settings)


KINDS = {
    "gpt2": small_preset("gpt2"),
    "gpt2-baseline": small_preset("gpt2-baseline"),
    "gpt2-fast": small_preset("gpt2-fast", zero_init_head=False, zero_init_projections=False),
    "llama3": small_preset("llama3-8b"),
    "mistral": small_preset("mistral-7b", sliding_window=5),
    "qwen3": small_preset("qwen3-0.6b", head_size=12),
    "alternating": replace(
        small_preset("gpt2"), sliding_window=4, layer_types=("full_attention", "sliding_attention", "full_attention")
    ),
}


@torch.no_grad()
def add_noise(model: AnyModel, scale: float = 0.2) -> AnyModel:
    """Add noise to every parameter, so that each one affects the output."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=scale)
    if isinstance(model, GPT):
        model.zero_padding()
    return model
