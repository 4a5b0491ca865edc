"""What spreads or spares a model's memory: activations computed again or kept in host memory."""

from whimbrel.distributed.offload import offload_activations
from whimbrel.distributed.recompute import find_blocks, memory_budget, recompute

__all__ = ["find_blocks", "memory_budget", "offload_activations", "recompute"]
