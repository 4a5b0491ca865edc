"""`[parallel]`: how a run is laid out over processes.

A layout is the size of each mesh dimension: `pp` pipeline stages, `dp_replicate` replicas, `dp_shard` shards of each
replica, and `tp` ranks that compute each layer together. Their product is the number of processes (the world size).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from whimbrel.base.errors import ConfigError

__all__ = ["Layout", "ParallelConfig", "resolve_layout"]

Strategy = Literal["ddp", "fsdp", "hsdp", "pipeline", "diloco", "auto"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
SIZES = ("pp", "dp_replicate", "dp_shard", "tp")
"""Mesh dimensions, outermost first: `tp` ranks are adjacent and use the fastest links."""
FILLS: dict[Strategy, str] = {
    "ddp": "dp_replicate", "fsdp": "dp_shard", "hsdp": "dp_replicate", "pipeline": "pp", "diloco": "dp_replicate",
}  # fmt: skip
"""The mesh dimension that gets the remaining ranks."""
OPTIONS: dict[str, Strategy] = {
    "reshard_after_forward": "fsdp", "cpu_offload": "fsdp", "param_dtype": "fsdp", "pipeline_schedule": "pipeline",
    "sync_every": "diloco", "outer_lr": "diloco", "outer_momentum": "diloco", "fragments": "diloco",
    "delta_dtype": "diloco", "delta_rank": "diloco",
}  # fmt: skip
"""Options that only one strategy has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Distributed training: a strategy, or the sizes of the mesh."""

    strategy: Strategy | None = None
    """ddp: replicate the model; fsdp: shard it; hsdp: shard within a node, replicate across nodes; pipeline: split the
    layers; diloco: synchronize replicas every sync_every steps; auto: choose by predicted memory and step time.
    Default: ddp."""
    dp_replicate: int | None = None
    """Number of replicas of the model."""
    dp_shard: int | None = None
    """Number of ranks that the parameters, gradients and optimizer state of a replica are sharded across (FSDP)."""
    tp: int | None = None
    """Tensor parallelism: number of ranks that compute each layer together."""
    pp: int | None = None
    """Pipeline parallelism: number of ranks that the layers are split across."""
    reshard_after_forward: bool = True
    """fsdp: free gathered parameters after the forward pass and gather them again in backward."""
    cpu_offload: bool = False
    """fsdp: keep parameters, gradients and optimizer state in host memory."""
    param_dtype: Literal["bf16", "fp16"] | None = None
    """fsdp: gather parameters and compute in this dtype; gradients are reduced in fp32."""
    pipeline_schedule: PipelineSchedule = "1f1b"
    """Order in which a pipeline runs the forward and backward passes of micro-batches (see train.accumulation)."""
    timeout: float = 600.0
    """Timeout of collective operations, in seconds."""
    sync_every: int = 50
    """diloco: number of steps between synchronizations."""
    outer_lr: float = 0.8
    """diloco: learning rate of the outer Nesterov optimizer; 1 without momentum averages the workers."""
    outer_momentum: float = 0.6
    """diloco: momentum of the outer Nesterov optimizer; the paper uses 0.9 with outer_lr = 0.7 in long runs."""
    fragments: int = 1
    """diloco: number of parts that the model is divided into, which are synchronized in turn (Streaming DiLoCo); 1: all
    at once."""
    delta_dtype: Literal["int8"] | None = None
    """diloco: quantize the exchanged parameter deltas; default: fp32."""
    delta_rank: int | None = None
    """diloco: send the delta of each matrix as two factors of this rank (PowerSGD); default: uncompressed."""

    def __post_init__(self) -> None:
        for name in (*SIZES, "timeout", "sync_every", "fragments", "delta_rank"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"expected parallel.{name} > 0 and finite, got {value}")
        if not 0 < self.outer_lr < math.inf:
            raise ConfigError(f"expected parallel.outer_lr > 0 and finite, got {self.outer_lr}")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(f"expected parallel.outer_momentum in [0, 1), got {self.outer_momentum}")
        if self.strategy in ("ddp", "diloco") and (self.dp_shard or 1) > 1:
            raise ConfigError(
                f"parallel.strategy = {self.strategy} replicates the model, got dp_shard = {self.dp_shard}: use hsdp"
            )
        if self.strategy == "fsdp" and (self.dp_replicate or 1) > 1:
            raise ConfigError(
                f"parallel.strategy = fsdp has one replica, got dp_replicate = {self.dp_replicate}: use hsdp"
            )
        if self.strategy == "diloco" and ((self.tp or 1) > 1 or (self.pp or 1) > 1):
            raise ConfigError("parallel.strategy = diloco does not work with tp or pp: remove them")
        if self.delta_dtype is not None and self.delta_rank is not None:
            raise ConfigError("expected parallel.delta_dtype or parallel.delta_rank, got both: remove one")
        self._check_unused()

    def _check_unused(self) -> None:
        """Raise for options of a strategy that is not used."""
        used = {
            "fsdp": self.strategy in ("fsdp", "hsdp", "auto") or (self.dp_shard or 1) > 1,
            "pipeline": self.strategy in ("pipeline", "auto") or (self.pp or 1) > 1,
            "diloco": self.strategy == "diloco",
        }
        for field in fields(self):
            owner, value = OPTIONS.get(field.name), getattr(self, field.name)
            if owner is not None and not used[owner] and value != field.default:
                raise ConfigError(
                    f"parallel.{field.name} = {value} has no effect without {owner}: set parallel.strategy = {owner}, "
                    "or remove it"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The size of each mesh dimension."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """Number of ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        sizes = [f"{name}={getattr(self, name)}" for name in SIZES if getattr(self, name) > 1]
        return ", ".join(sizes) or "one process"


def resolve_layout(config: ParallelConfig, world_size: int, ranks_per_node: int) -> Layout:
    """The layout for `world_size` processes; raises ConfigError with the legal choices if there is none."""
    if config.strategy == "auto":
        raise ConfigError(
            "parallel.strategy = auto needs a run config (whimbrel train, Trainer.from_config), got a model: choose "
            "ddp or fsdp"
        )
    strategy = config.strategy or "ddp"
    sizes = {name: getattr(config, name) for name in SIZES}
    fill, known = FILLS[strategy], math.prod(size or 1 for size in sizes.values())
    if strategy == "hsdp" and sizes["dp_shard"] is None and sizes["dp_replicate"] is not None:
        fill = "dp_shard"
    elif strategy == "hsdp" and sizes["dp_shard"] is None and world_size % known == 0:
        # Shards are in one node, next to those of tp.
        sizes["dp_shard"] = math.gcd(max(1, ranks_per_node // (sizes["tp"] or 1)), world_size // known)
        known *= sizes["dp_shard"]
    if sizes[fill] is None and world_size % known == 0:
        sizes[fill] = world_size // known
    layout = Layout(**{name: size or 1 for name, size in sizes.items()})
    if layout.world_size != world_size:
        given = [name for name in SIZES if getattr(config, name) is not None] or [fill]
        product = " x ".join(f"{name} = {getattr(layout, name)}" for name in given)
        divisors = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
        raise ConfigError(
            f"expected parallel sizes whose product is the number of processes, {world_size}, got {product}: use "
            f"factors of {world_size} ({', '.join(divisors)}), or start {layout.world_size} processes"
        )
    return layout
