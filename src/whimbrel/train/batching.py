"""How a step's tokens are cut into micro-batches."""

from __future__ import annotations

import torch

from whimbrel.base.errors import ConfigError
from whimbrel.models import GPTConfig
from whimbrel.train.device import free_memory

__all__ = ["accumulation_steps", "default_micro_batch"]

LARGEST_MICRO_BATCH = 65_536
"""Tokens in one pass beyond which a GPU gains nothing more."""
CPU_MICRO_BATCH = 4096
"""Tokens in one pass on a CPU: enough to fill its cores, little enough to stay near its caches."""


def accumulation_steps(tokens_per_step: int, micro_batch: int, sequence_length: int) -> int:
    """Micro-batches in an optimizer step; a total that they do not divide is refused with the nearest that they do."""
    tokens = micro_batch * sequence_length
    if tokens_per_step % tokens:
        below = tokens_per_step // tokens * tokens
        nearest = f"{below} or {below + tokens}" if below else f"{tokens}"
        raise ConfigError(
            f"train.tokens_per_step = {tokens_per_step} is not a multiple of train.micro_batch x sequence length = "
            f"{micro_batch} x {sequence_length} = {tokens}: the nearest legal total is {nearest}"
        )
    return tokens_per_step // tokens


def default_micro_batch(
    config: GPTConfig, tokens_per_step: int, sequence_length: int, device: torch.device, *, itemsize: int, reserve: int
) -> int:
    """The most sequences a pass can take: a divisor of the step that fits in 80% of free memory less `reserve`."""
    sequences = tokens_per_step // sequence_length
    if tokens_per_step % sequence_length:
        below = sequences * sequence_length
        raise ConfigError(
            f"train.tokens_per_step = {tokens_per_step} is not a multiple of the sequence length {sequence_length}: "
            f"the nearest legal totals are {below or sequence_length} and {below + sequence_length}"
        )
    free = free_memory(device)
    limit = (CPU_MICRO_BATCH if free is None else LARGEST_MICRO_BATCH) // sequence_length
    if free is not None:
        room = int(0.8 * free) - reserve
        limit = min(limit, room // (activation_bytes(config, itemsize) * sequence_length))
    return max(count for count in range(1, min(sequences, max(limit, 1)) + 1) if sequences % count == 0)


def activation_bytes(config: GPTConfig, itemsize: int) -> int:
    """About how many bytes a token leaves behind for backward: what each block's norms, products and MLP keep."""
    attention = (2 * config.num_heads + 2 * config.kv_heads) * config.head_width
    mlp = config.mlp_width * (4 if config.gated_mlp else 2)
    return config.num_layers * (6 * config.embd_size + attention + mlp) * itemsize
