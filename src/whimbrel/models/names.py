"""Where each tensor of a Hugging Face file lives in `GPT`: one table for reading and for writing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from whimbrel.models.config import GPTConfig
from whimbrel.models.gpt import GPT

__all__ = ["Place", "places"]


class Place(NamedTuple):
    """A tensor of theirs is these rows of a parameter of ours, transposed where their linears are (GPT-2)."""

    theirs: str
    ours: str
    rows: slice = slice(None)
    transposed: bool = False


@functools.cache
def places(model_type: str, config: GPTConfig) -> list[Place]:
    """Every tensor that a file of this family holds; a tied head is stored once, as the embedding."""
    with torch.device("meta"):
        parameters = [name for name, _ in GPT(config).named_parameters()]
    if model_type in ("gpt2", "whimbrel"):
        return [_same_name(name, config, linears_transposed=model_type == "gpt2") for name in parameters]
    return [place for name in parameters for place in _llama_places(name, config)]


def _same_name(name: str, config: GPTConfig, *, linears_transposed: bool) -> Place:
    if _is_vocabulary(name):
        return Place(name, name, slice(config.vocab_size))
    return Place(name, name, transposed=linears_transposed and ".c_" in name and name.endswith("weight"))


def _llama_places(name: str, config: GPTConfig) -> Iterator[Place]:
    if name == "lm_head.weight":
        yield Place(name, name, slice(config.vocab_size))
    elif name == "transformer.wte.weight":
        yield Place("model.embed_tokens.weight", name, slice(config.vocab_size))
    elif name == "transformer.ln_f.weight":
        yield Place("model.norm.weight", name)
    else:
        _, _, layer, part = name.split(".", 3)
        module, kind = part.rsplit(".", 1)
        start = 0
        for theirs, size in _llama_rows(module, config):
            rows = slice(None) if size is None else slice(start, start + size)
            yield Place(f"model.layers.{layer}.{theirs}.{kind}", name, rows)
            start += size or 0


def _llama_rows(module: str, config: GPTConfig) -> list[tuple[str, int | None]]:
    """Their modules that one of ours fuses, with the rows of each."""
    queries, keys = config.num_heads * config.head_width, config.kv_heads * config.head_width
    fused: dict[str, list[tuple[str, int | None]]] = {
        "ln_1": [("input_layernorm", None)],
        "attn.c_attn": [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)],
        "attn.q_norm": [("self_attn.q_norm", None)],
        "attn.k_norm": [("self_attn.k_norm", None)],
        "attn.c_proj": [("self_attn.o_proj", None)],
        "ln_2": [("post_attention_layernorm", None)],
        "mlp.c_fc": [("mlp.gate_proj", config.mlp_width), ("mlp.up_proj", config.mlp_width)],
        "mlp.c_proj": [("mlp.down_proj", None)],
    }
    return fused[module]


def _is_vocabulary(name: str) -> bool:
    return name in ("transformer.wte.weight", "lm_head.weight")
