"""Shared by benchmarks: Llama-shaped models, interleaved timing, process memory."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from whimbrel.models import GPT, GPTConfig

__all__ = ["TINY", "compile_blocks", "init_model", "interleave", "llama", "now", "process_memory"]

TINY = {"width": 128, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 256}
"""Model size for smoke tests: arguments of `llama`."""


def llama(
    width: int, layers: int, heads: int, kv_heads: int, mlp: int, *, vocab: int = 1024, context: int = 2048
) -> GPTConfig:
    """Config of a Llama-shaped model."""
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


def compile_blocks(model: GPT, enabled: bool) -> GPT:
    """Compile the blocks of the model in place if enabled; returns the model."""
    if enabled:
        for block in model.blocks:
            block.compile()
    return model


def now(device: torch.device) -> float:
    """The time in seconds, after all queued work on the device is done."""
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
    return {name: statistics.median(values) for name, values in times.items()}


def process_memory(field: str, pid: int | str = "self") -> float:
    """Memory of a process in bytes: VmRSS (resident), VmHWM (peak resident) or RssAnon; NaN without /proc."""
    status = Path(f"/proc/{pid}/status")
    match = re.search(rf"{field}:\s+(\d+) kB", status.read_text(encoding="utf-8")) if status.exists() else None
    return int(match[1]) * 1024 if match else float("nan")
