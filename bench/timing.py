"""Shared by benchmarks: Llama-shaped models and interleaved timing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from whimbrel.models import GPT, GPTConfig

__all__ = ["TINY", "compiled", "init_model", "interleave", "llama", "now"]

TINY = {"width": 128, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 256}
"""For smoke tests."""


def llama(
    width: int, layers: int, heads: int, kv_heads: int, mlp: int, *, vocab: int = 1024, context: int = 2048
) -> GPTConfig:
    """The config of a Llama-shaped model."""
    return GPTConfig(
        vocab_size=vocab, context_length=context, num_layers=layers, embd_size=width, num_heads=heads,
        num_kv_heads=kv_heads, mlp_size=mlp, position="rope", norm="rms", activation="silu", gated_mlp=True,
        bias="none",
    )  # fmt: skip


def init_model(config: GPTConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> GPT:
    """A model with random weights."""
    torch.manual_seed(seed)
    with device:
        return GPT(config).to(dtype)


def compiled(model: GPT, enabled: bool) -> GPT:
    """Compile the blocks of the model in place, if enabled."""
    if enabled:
        for block in model.blocks:
            block.compile()
    return model


def now(device: torch.device) -> float:
    """The time after all queued work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def interleave(
    contenders: dict[str, Callable[[], Any]], device: torch.device, rounds: int, repeats: int
) -> dict[str, float]:
    """Median seconds of each contender; interleaved, so that a change of clock speed affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            start = now(device)
            for _ in range(repeats):
                work()
            times[name].append((now(device) - start) / repeats)
    return {name: statistics.median(taken) for name, taken in times.items()}
