"""Tensor functions: a reference implementation in torch, and a fast path behind the same name."""

from whimbrel.ops.attention import (
    KVView,
    attend,
    attend_reference,
    can_attend_packed,
    cumulative_lengths,
    packed_attention,
    write_blocks,
)
from whimbrel.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from whimbrel.ops.token_losses import (
    distillation_loss_reference,
    linear_distillation_loss,
    linear_log_probs,
    linear_log_probs_reference,
    linear_top_k,
    top_k_log_probs,
)

__all__ = [
    "KVView",
    "attend",
    "attend_reference",
    "can_attend_packed",
    "cumulative_lengths",
    "distillation_loss_reference",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "linear_distillation_loss",
    "linear_log_probs",
    "linear_log_probs_reference",
    "linear_top_k",
    "packed_attention",
    "top_k_log_probs",
    "write_blocks",
]
