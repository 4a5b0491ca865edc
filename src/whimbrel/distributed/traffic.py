"""What a layout costs: bytes that each rank sends in a step, and the time of a step on a network.

The formulas assume ring algorithms: an all-reduce of b bytes over n ranks sends 2 (n - 1) / n b from each rank, an
all-gather to b bytes or a reduce-scatter of them (n - 1) / n b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from whimbrel.base.errors import ConfigError
from whimbrel.distributed.diloco import factor_shapes
from whimbrel.distributed.layout import Layout, ParallelConfig
from whimbrel.ops.lowbit import BLOCK_SIZE

__all__ = ["Network", "Workload", "step_seconds", "traffic"]

GRADIENT_BYTES = 4
INT8_FRACTION = (1 + 4 / BLOCK_SIZE) / 4
"""Bytes of an int8 delta with its scales, per byte of fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """An optimizer step of a decoder."""

    parameters: int
    layers: int
    width: int
    tokens: int
    """Tokens per micro-batch of one data rank."""
    micro_batches: int
    """Micro-batches per optimizer step of one data rank (gradient accumulation)."""
    param_bytes: int = 4
    """Bytes per gathered parameter (FSDP)."""
    activation_bytes: int = 2
    """Bytes per activation."""
    recompute: bool = False
    """Whether backward repeats the forward pass of each block."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of all parameters, for the factors of `parallel.delta_rank`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Bandwidths in bytes per second per rank, in one direction, and the compute speed of a device."""

    ranks_per_node: int = 8
    within_node: float = 400e9
    between_nodes: float = 40e9
    flops: float = 400e12
    """FLOP/s of a device in a step without communication: its peak times the MFU of one device."""
    latency: float = 20e-6
    """Minimum time of a collective operation in seconds."""


def traffic(workload: Workload, layout: Layout, config: ParallelConfig) -> dict[str, float]:
    """Bytes that each rank sends per optimizer step, by mesh dimension."""
    work, parameters = workload, workload.parameters / (layout.tp * layout.pp)
    activations = work.tokens * work.width * work.activation_bytes * work.micro_batches
    shards, replicas = layout.dp_shard, layout.dp_replicate
    # FSDP gathers parameters for forward and (after resharding) for backward, and reduces gradients, per micro-batch.
    gathers = 2 if config.reshard_after_forward else 1
    sharded = work.micro_batches * (gathers * work.param_bytes + GRADIENT_BYTES) * parameters
    replicated = 2 * GRADIENT_BYTES * parameters / shards
    if config.strategy == "diloco":
        replicated *= _delta_fraction(work, config) / config.sync_every
    # Two all-reduces per layer in forward (attention, MLP), two in backward, and two more to recompute the forward.
    layers = work.layers / layout.pp
    all_reduces = 2 * layers * (3 if work.recompute else 2)
    return {
        "pp": 2.0 * activations if layout.pp > 1 else 0.0,
        "dp_replicate": (replicas - 1) / replicas * replicated,
        "dp_shard": (shards - 1) / shards * sharded,
        "tp": 2 * (layout.tp - 1) / layout.tp * all_reduces * activations,
    }


def _collectives(work: Workload, layout: Layout, config: ParallelConfig) -> dict[str, float]:
    """Collective operations of a rank per optimizer step, by mesh dimension. DDP reduces a few large buckets."""
    layers = work.layers / layout.pp
    counts = {
        "pp": 2 * work.micro_batches,
        "dp_replicate": 1.0 / (config.sync_every if config.strategy == "diloco" else 1),
        "dp_shard": work.micro_batches * (layers + 1) * (3 if config.reshard_after_forward else 2),
        "tp": work.micro_batches * 2 * layers * (3 if work.recompute else 2),
    }
    return {name: count if getattr(layout, name) > 1 else 0 for name, count in counts.items()}


def _delta_fraction(work: Workload, config: ParallelConfig) -> float:
    """The size of a DiLoCo delta as sent, relative to fp32."""
    if config.delta_rank is None:
        return INT8_FRACTION if config.delta_dtype == "int8" else 1.0
    if sum(map(math.prod, work.shapes)) != work.parameters:
        raise ConfigError(
            f"parallel.delta_rank: expected the shapes of {work.parameters} parameters: set Workload.shapes"
        )
    sent = 0
    for shape in work.shapes:
        factors = factor_shapes(shape, config.delta_rank)
        sent += math.prod(shape) if factors is None else sum(map(math.prod, factors))
    return sent / work.parameters


def step_seconds(workload: Workload, layout: Layout, config: ParallelConfig, network: Network) -> float:
    """The time of a step: data parallelism communicates during computation, tensor and pipeline parallelism do not.

    A dimension uses the bandwidth within a node if its ranks fit on one, together with those of inner dimensions.
    """
    neighbors, seconds, counts = 1, dict[str, float](), _collectives(workload, layout, config)
    for name, sent in reversed(traffic(workload, layout, config).items()):
        neighbors *= getattr(layout, name)
        bandwidth = network.within_node if neighbors <= network.ranks_per_node else network.between_nodes
        seconds[name] = sent / bandwidth + counts[name] * network.latency
    tokens = workload.tokens * workload.micro_batches
    flops = (8 if workload.recompute else 6) * workload.parameters * tokens / (layout.tp * layout.pp)
    bubble = (layout.pp - 1) / workload.micro_batches
    computation = flops / network.flops
    overlapped = max(computation, seconds["dp_shard"] + seconds["dp_replicate"])
    return overlapped + bubble * computation + seconds["tp"] + seconds["pp"]
