"""Small models of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from tests.support.byte_tokenizer import byte_tokenizer

from whimbrel.model_io import load_model, save_adapter, save_model
from whimbrel.models import GPT, GPTConfig, LoraConfig, apply_lora, lora_parameters, preset

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
    "gpt2-fast": small_preset("gpt2-fast", value_embeddings=1, zero_init_head=False, zero_init_projections=False),
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


def save_with_adapters(folder: Path, names: Sequence[str]) -> None:
    """A random model with a byte tokenizer in `base`, and random adapters of it in directories of these names."""
    shape = GPTConfig(context_length=128, vocab_size=257, num_layers=2, embd_size=32, num_heads=2)
    torch.manual_seed(0)
    save_model(add_noise(GPT(shape), 0.1), folder / "base", byte_tokenizer())
    for seed, name in enumerate(names):
        model = load_model(folder / "base")
        apply_lora(model, LoraConfig(rank=4 + seed))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in lora_parameters(model):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
        save_adapter(model, folder / name)
