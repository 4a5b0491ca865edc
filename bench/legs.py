"""What benchmarks share: models of Llama's kind, and legs that are timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from whimbrel.models import GPT, GPTConfig

__all__ = ["TINY", "compiled", "draw", "in_turns", "llama", "now"]

TINY = {"width": 128, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 256}
"""A shape that only shows that something runs."""


def llama(
    width: int, layers: int, heads: int, kv_heads: int, mlp: int, *, vocab: int = 1024, context: int = 2048
) -> GPTConfig:
    """A model of Llama's kind."""
    return GPTConfig(
        vocab_size=vocab, context_length=context, num_layers=layers, embd_size=width, num_heads=heads,
        num_kv_heads=kv_heads, mlp_size=mlp, position="rope", norm="rms", activation="silu", gated_mlp=True,
        bias="none",
    )  # fmt: skip


def draw(config: GPTConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> GPT:
    """A model with fresh weights."""
    torch.manual_seed(seed)
    with device:
        return GPT(config).to(dtype)


def compiled(model: GPT, wanted: bool) -> GPT:
    """The model, its blocks compiled where that is wanted."""
    if wanted:
        for block in model.blocks:
            block.compile()
    return model


def now(device: torch.device) -> float:
    """The time when all that the device was asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def in_turns(legs: dict[str, Callable[[], Any]], device: torch.device, rounds: int, repeats: int) -> dict[str, float]:
    """Median seconds of each leg; they take turns, so that a device that slows down does so for all."""
    times: dict[str, list[float]] = {name: [] for name in legs}
    for _ in range(rounds):
        for name, work in legs.items():
            start = now(device)
            for _ in range(repeats):
                work()
            times[name].append((now(device) - start) / repeats)
    return {name: statistics.median(taken) for name, taken in times.items()}
