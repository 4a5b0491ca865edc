"""Summary of a run before its first step: sizes, memory, features."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from whimbrel.optim import ParameterRow, ProjectInBackward, StepInBackward, state_bytes
from whimbrel.train.config import TrainerConfig

__all__ = ["MemoryEstimate", "RunSummary", "estimate_memory", "features"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory in bytes that does not depend on the batch size (no activations)."""

    weights: int
    gradients: int
    optimizer: int | None
    """None if unknown before the first step, as for third-party optimizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Facts to print before the first step."""

    device: str
    device_name: str
    parameters: int
    frozen_parameters: int
    memory: MemoryEstimate
    optimizer_table: tuple[ParameterRow, ...] = ()
    """Optimizer and settings of each parameter."""
    samples_per_step: int
    tokens_per_step: int | None = None
    """None if the sequence length is not known."""
    tokens_per_micro_batch: int | None = None
    accumulation: int
    total_steps: int
    first_step: int = 0
    flops_per_token: float | None = None
    peak_flops: float | None = None
    compile_seconds: float = 0.0
    features: tuple[str, ...] = ()
    """Enabled features: `bf16`, `compiled block`, `asynchronous saves`, `EMA 0.999`."""
    resumed_from: Path | None = None


def estimate_memory(model: nn.Module, optimizer: Optimizer | None) -> MemoryEstimate:
    """Bytes of weights, gradients, and the state that `optimizer` has or will have."""
    weights = [*model.parameters(), *model.buffers()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    states = None if optimizer is None else state_bytes(optimizer)
    optimizer_bytes = None if states is None else sum(states.values())
    return MemoryEstimate(
        weights=sum(w.nbytes for w in weights), gradients=_gradient_bytes(trained, optimizer), optimizer=optimizer_bytes
    )


def _gradient_bytes(trained: list[nn.Parameter], optimizer: Optimizer | None) -> int:
    """Gradient bytes; with optimizer_in_backward only the projected gradients or the largest single one."""
    if isinstance(optimizer, StepInBackward):
        return max(_bytes([parameter]) for parameter in trained)
    if isinstance(optimizer, ProjectInBackward):
        moved = optimizer.optimizer
        sizes = (
            (p, p.numel() if moved.needs_full_grad(p) else moved.layout_of(p).low_rank_shape.numel()) for p in trained
        )
        return sum(size * p.element_size() for p, size in sizes)
    return _bytes(trained)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def features(config: TrainerConfig) -> tuple[str, ...]:
    """Names of the enabled features."""
    train, checkpoint = config.train, config.checkpoint
    enabled = {
        train.precision: train.precision != "fp32",
        f"fp8 {train.fp8_recipe}": train.fp8_recipe is not None,
        f"QAT {train.qat_recipe}": train.qat_recipe is not None,
        f"{train.weights} weights": train.weights is not None,
        f"compiled {train.compile_scope}": train.compile,
        f"recompute {train.recompute}": train.recompute != "none",
        "activations in host memory": train.activation_offloading,
        "optimizer in backward": train.optimizer_in_backward,
        "projected linears": train.projected_linears,
        "deterministic": train.deterministic,
        "anomaly detection": train.detect_anomaly,
        f"non-finite steps: {train.on_nonfinite}": train.on_nonfinite != "stop",
        "asynchronous saves": checkpoint.asynchronous,
        f"EMA {config.ema.decay}": config.ema.decay is not None,
        "early stopping": config.early_stopping.patience is not None,
        f"divergence: {config.divergence.action}": config.divergence.action is not None,
        "TensorBoard": config.log.tensorboard,
    }
    return tuple(name for name, on in enabled.items() if on)
