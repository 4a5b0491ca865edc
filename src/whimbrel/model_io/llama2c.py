"""Models in llama2.c's first binary format: seven numbers, then every weight in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import materialise_

__all__ = ["load_llama2c", "read_llama2c_config"]

VERSIONED = 0x616B3432
"""The first number of llama2.c's later formats."""


class Header(NamedTuple):
    """The numbers a file opens with; a negative `vocab_size` means that the head is not tied."""

    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context_length: int


def read_llama2c_config(path: Path) -> GPTConfig:
    """The shape of the Llama in a llama2.c file."""
    return _config(path, _read_header(path))


def load_llama2c(path: Path) -> GPT:
    """The Llama in a llama2.c file."""
    header = _read_header(path)
    config = _config(path, header)
    shapes = _shapes(header, config)
    expected = 4 * (len(header) + sum(int(np.prod(shape)) for shape in shapes.values()))
    if path.stat().st_size != expected:
        raise CheckpointError(
            f"{path} has {path.stat().st_size} bytes where a llama2.c model of this shape has {expected}: "
            "it is cut short or another format"
        )
    flat = torch.from_numpy(np.fromfile(path, dtype="<f4", offset=4 * len(header)))
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    tensors = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), flat.split(sizes), strict=True)}
    with torch.device("meta"):
        model = GPT(config)
    materialise_(model, "cpu")
    model.zero_padding()
    _fill(model, tensors)
    return model


def _read_header(path: Path) -> Header:
    numbers = np.fromfile(path, dtype="<i4", count=len(Header._fields)).tolist()
    if len(numbers) < len(Header._fields):
        raise CheckpointError(f"{path} is too short to be a llama2.c model")
    if numbers[0] == VERSIONED:
        raise CheckpointError(f"{path} is a llama2.c model of version {numbers[1]}: export it as version 0")
    return Header(*numbers)


def _config(path: Path, header: Header) -> GPTConfig:
    try:
        return GPTConfig(
            context_length=header.context_length,
            vocab_size=abs(header.vocab_size),
            num_layers=header.num_layers,
            embd_size=header.dim,
            num_heads=header.num_heads,
            num_kv_heads=header.num_kv_heads,
            mlp_size=header.hidden_dim,
            norm="rms",
            position="rope",
            activation="silu",
            gated_mlp=True,
            bias="none",
            tied_head=header.vocab_size > 0,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path} is not a llama2.c model: {error}") from error


def _shapes(header: Header, config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Every array of the file, in its order."""
    layers, dim, hidden = header.num_layers, header.dim, header.hidden_dim
    keys, half_head = config.kv_heads * config.head_width, config.head_width // 2
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, dim),
        "attention_norm": (layers, dim),
        "query": (layers, dim, dim),
        "key": (layers, keys, dim),
        "value": (layers, keys, dim),
        "output": (layers, dim, dim),
        "mlp_norm": (layers, dim),
        "gate": (layers, hidden, dim),
        "down": (layers, dim, hidden),
        "up": (layers, hidden, dim),
        "final_norm": (dim,),
        "rope_cosine": (config.context_length, half_head),
        "rope_sine": (config.context_length, half_head),
    }
    return shapes if config.tied_head else shapes | {"head": (config.vocab_size, dim)}


@torch.no_grad()
def _fill(model: GPT, tensors: dict[str, Tensor]) -> None:
    config = model.config
    state = dict(model.named_parameters())
    state["transformer.wte.weight"][: config.vocab_size] = tensors["embedding"]
    state["transformer.ln_f.weight"].copy_(tensors["final_norm"])
    if not config.tied_head:
        state["lm_head.weight"][: config.vocab_size] = tensors["head"]
    for layer in range(config.num_layers):
        part = {name: tensor[layer] for name, tensor in tensors.items() if tensor.size(0) == config.num_layers}
        query, key = (_halves(part[name], config.head_width) for name in ("query", "key"))
        block = f"transformer.h.{layer}"
        state[f"{block}.ln_1.weight"].copy_(part["attention_norm"])
        state[f"{block}.attn.c_attn.weight"].copy_(torch.cat((query, key, part["value"])))
        state[f"{block}.attn.c_proj.weight"].copy_(part["output"])
        state[f"{block}.ln_2.weight"].copy_(part["mlp_norm"])
        state[f"{block}.mlp.c_fc.weight"].copy_(torch.cat((part["gate"], part["up"])))
        state[f"{block}.mlp.c_proj.weight"].copy_(part["down"])


def _halves(weight: Tensor, head_size: int) -> Tensor:
    """Reorder the rows of each head: llama2.c rotates neighbours (2i, 2i + 1), we rotate halves (i, i + size / 2)."""
    rows, columns = weight.shape
    return weight.view(-1, head_size // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
