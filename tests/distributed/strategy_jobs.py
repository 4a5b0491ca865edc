"""Jobs for test_strategy.py: what the options of FSDP change in a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.fsdp
from torch import nn

from whimbrel.distributed.deferred_init import defer_loading, materialize_
from whimbrel.distributed.layout import ParallelConfig
from whimbrel.distributed.state import full_tensor
from whimbrel.distributed.strategy import shard_or_replicate
from whimbrel.distributed.world import join_world
from whimbrel.model_io import load_weights, read_config
from whimbrel.models import GPT, GPTConfig, LoraConfig, apply_lora
from whimbrel.models.lora import initialize_lora

LENGTH, VOCAB = 8, 32


def observe_fsdp(settings: dict[str, Any]) -> dict[str, Any]:
    """Train a step; returns dtypes, placements and what is gathered when."""
    config = ParallelConfig(**{"strategy": "fsdp"} | settings)
    device = torch.device("cpu")
    world, model = join_world(config, "cpu"), _make_model()
    block = next(model.blocks)
    found: dict[str, Any] = {}

    def during_forward(module: nn.Module, _inputs: Any) -> None:
        found["compute_dtype"] = str(next(module.parameters()).dtype)

    with mock.patch("torch.distributed.fsdp.fully_shard", wraps=torch.distributed.fsdp.fully_shard) as fully_shard:
        shard_or_replicate(model, world, config, device)
    found["offload"] = type(fully_shard.call_args.kwargs["offload_policy"]).__name__
    block.attn.register_forward_pre_hook(during_forward)
    tokens = torch.arange(LENGTH).repeat(2, 1) % VOCAB
    loss = model(tokens, labels=tokens).loss
    found["gathered_after_forward"] = not hasattr(next(block.parameters()), "placements")
    loss.backward()
    parameter: Any = next(block.parameters())
    found["placements"] = [type(placement).__name__ for placement in parameter.placements]
    found["dtypes"] = [str(parameter.dtype), str(parameter.grad.dtype)]
    return found


def deferred_adapters(path: Path, settings: dict[str, Any]) -> dict[str, list[float]]:
    """The parameters of a model with adapters that is loaded after it is sharded."""
    config = ParallelConfig(**settings)
    world = join_world(config, "cpu")
    with torch.device("meta"):
        model = GPT(read_config(path).config)
        apply_lora(model, LoraConfig(rank=3, use_dora=True))

    def load(model: nn.Module) -> None:
        assert isinstance(model, GPT)
        load_weights(model, path)
        initialize_lora(model, seed=5)

    defer_loading(model, load)
    shard_or_replicate(model, world, config, torch.device("cpu"))
    materialize_(model, [model], torch.device("cpu"))
    return {name: full_tensor(parameter.detach()).flatten().tolist() for name, parameter in model.named_parameters()}


def parameter_bytes(settings: dict[str, Any]) -> list[int]:
    """Bytes of the parameters on this rank, and of the complete model."""
    config = ParallelConfig(**settings)
    world, model = join_world(config, "cpu"), _make_model()
    complete = _bytes(model)
    shard_or_replicate(model, world, config, torch.device("cpu"))
    return [_bytes(model), complete]


def _bytes(model: nn.Module) -> int:
    parameters: list[Any] = list(model.parameters())
    return sum((p.to_local() if hasattr(p, "placements") else p).nbytes for p in parameters)


def _make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(num_layers=2, num_heads=2, embd_size=16, vocab_size=VOCAB, context_length=LENGTH))
