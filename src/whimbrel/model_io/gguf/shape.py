"""The shape of a model in GGUF's own words, and the refusal of what those words cannot say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from gguf import GGUFWriter, RopeScalingType
from torch import Tensor

from whimbrel.base.errors import ConfigError
from whimbrel.models import GPTConfig
from whimbrel.models.layers import rope_frequencies

__all__ = ["architecture", "rope_factors", "unread_by_transformers", "write_shape"]

ARCHITECTURES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The architecture that computes what each family does; Mistral is Llama to it."""


def architecture(model_type: str, config: GPTConfig) -> str:
    """GGUF's name for what computes this model; one that no architecture computes exactly is refused."""
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"GGUF has no architecture for model_type '{model_type}': export it with --format hf, or train a shape of "
            f"{', '.join(ARCHITECTURES)}"
        )
    arch = ARCHITECTURES[model_type]
    for unfit in _unfit(arch, config):
        raise ConfigError(f"GGUF's architecture '{arch}' cannot hold {unfit}: export it with --format hf")
    return arch


def _unfit(arch: str, config: GPTConfig) -> Iterator[str]:
    activation = "gelu_tanh" if arch == "gpt2" else "silu"
    if config.activation != activation:
        yield f"the activation {config.activation} (it has {activation})"
    windows = [window for window in config.windows if window is not None and window < config.context_length]
    if windows:
        yield f"a sliding window of {windows[0]} tokens in a context of {config.context_length} (it attends to all)"
    if arch == "qwen3" and config.bias != "none":
        yield f"biases ({config.bias})"
    if arch != "llama" and config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        yield "rope scaling of kind llama3"


def unread_by_transformers(arch: str, config: GPTConfig) -> Iterator[str]:
    """What a file of this shape tells llama.cpp, and `transformers` puts a value of its own for, in silence."""
    if config.rope_scaling is not None:
        yield "rope scaling"
    if arch == "llama" and config.bias != "none":
        yield "biases"
    if arch == "gpt2" and config.mlp_width != 4 * config.embd_size:
        yield "the width of the MLP"
    if config.head_width != {"qwen2": config.embd_size // config.num_heads, "qwen3": 128}.get(arch, config.head_width):
        yield "the head size"


def write_shape(writer: GGUFWriter, config: GPTConfig) -> None:
    """Every number that a reader needs to build the model."""
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.embd_size)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.norm == "layer":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.position == "rope":
        writer.add_head_count_kv(config.kv_heads)
        writer.add_key_length(config.head_width)
        writer.add_value_length(config.head_width)
        writer.add_rope_dimension_count(config.head_width)
        writer.add_rope_freq_base(config.rope_theta)
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)


def rope_factors(config: GPTConfig) -> Tensor | None:
    """What each rotary frequency is divided by, where that differs from one to the next (llama3)."""
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        return None
    device = torch.device("cpu")
    return rope_frequencies(replace(config, rope_scaling=None), device) / rope_frequencies(config, device)
