"""Distributed training: layouts, data, tensor and pipeline parallelism, and activation memory."""

from whimbrel.distributed.activation_checkpoint import (
    activation_memory_budget,
    apply_activation_checkpointing,
    find_blocks,
    offload_activations,
)
from whimbrel.distributed.diloco import DiLoCo
from whimbrel.distributed.failure import report_failure
from whimbrel.distributed.layout import Layout, ParallelConfig
from whimbrel.distributed.pipeline import PipelineModel
from whimbrel.distributed.sharded_rows import check_replicas
from whimbrel.distributed.strategy import (
    check_same_weights,
    clip_gradients_,
    gradient_norm,
    gradient_sync,
    shard_or_replicate,
    unwrap,
)
from whimbrel.distributed.tensor_parallel import apply_tensor_parallel
from whimbrel.distributed.world import World, join_world

__all__ = [
    "DiLoCo",
    "Layout",
    "ParallelConfig",
    "PipelineModel",
    "World",
    "activation_memory_budget",
    "apply_activation_checkpointing",
    "apply_tensor_parallel",
    "check_replicas",
    "check_same_weights",
    "clip_gradients_",
    "find_blocks",
    "gradient_norm",
    "gradient_sync",
    "join_world",
    "offload_activations",
    "report_failure",
    "shard_or_replicate",
    "unwrap",
]
