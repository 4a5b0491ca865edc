"""Train models that do not fit on a device: activation checkpointing, the compiler's memory budget, and offload."""

from whimbrel.distributed.activation_checkpoint import (
    activation_memory_budget,
    apply_activation_checkpointing,
    find_blocks,
    offload_activations,
)

__all__ = ["activation_memory_budget", "apply_activation_checkpointing", "find_blocks", "offload_activations"]
