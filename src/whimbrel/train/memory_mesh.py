"""Predict the memory of one rank of a mesh, and choose the cheapest strategy that fits (`parallel.strategy = "auto"`).

Parameters, gradients and optimizer states follow from the shapes that a rank holds: tensor parallelism divides heads
and MLP width, a pipeline the layers, FSDP the rows of every parameter. Activations are measured on a simulated device
(`memory`) for a model with the shapes of one rank. A layout of one process is predicted exactly as by `memory`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from whimbrel.base.errors import ConfigError
from whimbrel.base.files import format_bytes
from whimbrel.distributed.layout import Layout, ParallelConfig, resolve_layout
from whimbrel.distributed.pipeline import split_layers, stage_indices
from whimbrel.distributed.traffic import Network, Workload, step_seconds, traffic
from whimbrel.distributed.world import launched_processes
from whimbrel.models import GPT
from whimbrel.optim.build import state_bytes
from whimbrel.precision import QuantizedWeight
from whimbrel.train import build
from whimbrel.train.device import choose_device, peak_flops, total_memory
from whimbrel.train.memory import (
    Holdings,
    Measurement,
    MemoryPrediction,
    measure_optimizer,
    measure_passes,
    meta_model,
    predict_step,
    resolve,
    with_optimizer,
)
from whimbrel.train.memory_tracker import allocated_bytes
from whimbrel.train.run_config import ModelConfig, RunConfig

__all__ = ["choose_strategy", "predict_mesh_memory", "predict_pipeline_ranks", "resolve_strategy"]

logger = logging.getLogger(__name__)

NO_FILES = Path(os.devnull, "model")
"""A path that does not exist, in place of `model.path` for models whose size was changed."""
FEW_LAYERS = (2, 4)
"""Layers of the models on which activations are measured."""
PREFETCHED_BLOCKS = 2
"""Blocks that FSDP holds gathered at a time: the current one, and the next."""
CPU_NETWORK = Network(within_node=5e9, between_nodes=1e9, flops=1e11, latency=5e-4)
"""A few cores per process, and gloo."""
MAX_SLOWDOWN = 1.1
"""How much longer a step of a simpler layout may take."""
MAX_MEMORY_FRACTION = 0.92
"""Fraction of a device's memory that a prediction may take: the rest is for fragmentation and communication."""


def predict_mesh_memory(
    config: RunConfig, layout: Layout, device_type: str, names: Iterable[str] | None = None
) -> list[MemoryPrediction]:
    """Predict a step's memory on the rank of `layout` that needs the most, for each optimizer (None: the run's)."""
    _check(config)
    config = resolve(config, device_type, layout.dp)
    predictions = []
    for name in [config.optim.name] if names is None else names:
        ranks = predict_pipeline_ranks(with_optimizer(config, name), layout, device_type)
        predictions.append(max(ranks, key=lambda prediction: prediction.peak))
    return predictions


def _check(config: RunConfig) -> None:
    train = config.train
    for name, is_set in {
        "train.weight_dtype": train.weight_dtype is not None,
        "train.optimizer_in_backward": train.optimizer_in_backward,
    }.items():
        if is_set:
            raise ConfigError(f"memory prediction for several ranks does not support {name}: remove it")


def predict_pipeline_ranks(config: RunConfig, layout: Layout, device_type: str) -> list[MemoryPrediction]:
    """The memory of each rank of a pipeline, or of one rank without; `config` has a micro-batch and accumulation."""
    local = replace(config, model=_local_architecture(config.model, layout.tp))
    predictions = []
    for stages in _pipeline_ranks(config, layout):
        rank = replace(_with_layers(local, stages.blocks), parallel=ParallelConfig())
        rows, temporaries = _measure_optimizer(rank, device_type)
        holdings = _holdings(local, layout, stages, temporaries // layout.dp_shard, device_type)
        computed = _in_param_dtype(rank, config.parallel.param_dtype)
        passes = (
            _measure_passes(computed, device_type) if layout.pp == 1 else _measure_stages(computed, device_type, stages)
        )
        predictions.append(replace(predict_step(local, device_type, rows, passes, holdings), layout=str(layout)))
    return predictions


def _local_architecture(model: ModelConfig, tp: int) -> ModelConfig:
    """A model with the shapes of one tensor-parallel rank."""
    if tp == 1:
        return model
    sizes = {"num_heads": model.num_heads, "num_kv_heads": model.kv_heads, "mlp_size": model.intermediate_size}
    for name, size in sizes.items():
        if size % tp:
            raise ConfigError(f"expected parallel.tp that divides model.{name} = {size}, got {tp}")
    local: dict[str, Any] = {name: size // tp for name, size in sizes.items()}
    return replace(model, **local, head_size=model.head_dim, path=None if model.path is None else NO_FILES)


def _in_param_dtype(config: RunConfig, param_dtype: str | None) -> RunConfig:
    """A run that computes in the dtype in which FSDP gathers parameters."""
    if param_dtype is None:
        return config
    return replace(
        config, train=replace(config.train, default_dtype="bfloat16" if param_dtype == "bf16" else "float16")
    )


_measure_passes = cache(measure_passes)
_measure_optimizer = cache(measure_optimizer)


def _measure_stages(config: RunConfig, device_type: str, stages: _Stages) -> Measurement:
    """The passes of a pipeline rank, which holds the activations of several micro-batches, and their gradients."""
    few, more = (
        _measure_passes(replace(_with_layers(config, count), train=replace(config.train, accumulation=1)), device_type)
        for count in FEW_LAYERS
    )
    per_layer = (more.max["activations"] - few.max["activations"]) // (FEW_LAYERS[1] - FEW_LAYERS[0])
    other = few.max["activations"] - FEW_LAYERS[0] * per_layer  # embedding, final norm, logits and loss
    activations = int(stages.in_flight * stages.blocks * per_layer) + (other if stages.is_last else 0)
    profile = {("backward", more.max["gradients"]): activations}
    return replace(more, max=more.max | {"activations": activations}, profile=profile)


def _with_layers(config: RunConfig, count: int) -> RunConfig:
    if count == config.model.num_layers:
        return config
    types, path = config.model.layer_types, None if config.model.path is None else NO_FILES
    layers: dict[str, Any] = {"num_layers": count, "layer_types": None if types is None else types[:count]}
    return replace(config, model=replace(config.model, **layers, path=path))


@dataclass(frozen=True, slots=True)
class _Stages:
    """What one rank of a pipeline holds."""

    blocks: int
    is_first: bool
    is_last: bool
    in_flight: float
    """Micro-batches whose activations it holds at a time, as complete passes through its blocks."""


def _pipeline_ranks(config: RunConfig, layout: Layout) -> Iterator[_Stages]:
    """The ranks of a pipeline, or one rank with all layers."""
    layers, pp, schedule = config.model.num_layers, layout.pp, config.parallel.pipeline_schedule
    if pp == 1:
        yield _Stages(layers, is_first=True, is_last=True, in_flight=1)
        return
    micro_batches = config.train.accumulation or 1
    model = _one_block(config)
    block = float(sum(p.numel() for p in next(iter(model.blocks)).parameters()))
    per_rank = len(stage_indices(schedule, 0, pp))
    ranges = split_layers([block] * layers, pp * per_rank, last=float(model.lm_head.weight.numel()))
    for rank in range(pp):
        indices = stage_indices(schedule, rank, pp)
        in_flight = {
            "gpipe": micro_batches,
            "1f1b": min(micro_batches, pp - rank),
            "interleaved": min(2 * micro_batches, 2 * (pp - rank - 1) + pp + 1) / 2,
            "zero-bubble": min(micro_batches, pp),
        }[schedule]
        yield _Stages(
            sum(len(ranges[index]) for index in indices),
            is_first=0 in indices,
            is_last=len(ranges) - 1 in indices,
            in_flight=in_flight,
        )


_all_blocks = cache(meta_model)


@cache
def _one_block(config: RunConfig) -> GPT:
    """The model with one block, on the meta device: all blocks have the same shapes."""
    return meta_model(_with_layers(config, 1))


def _holdings(config: RunConfig, layout: Layout, stages: _Stages, temporaries: int, device_type: str) -> Holdings:
    parallel, shards = config.parallel, layout.dp_shard
    # Adapters may be on the linear layers of some blocks only.
    model, count = (_one_block(config), stages.blocks) if config.lora is None else (_all_blocks(config), 1)
    blocks, root = [list(block.parameters()) for block in model.blocks], _root_parameters(model, stages)
    held = [(parameter, 1) for parameter in root] + [(parameter, count) for block in blocks for parameter in block]
    trained = [(parameter, count) for parameter, count in held if parameter.requires_grad]
    states = state_bytes(build.create_optimizer(model, config, None), shards) or {}
    gathered = unreduced = outer = 0
    if shards > 1:
        block = max(blocks, key=lambda parameters: _complete_bytes(parameters, parallel))
        num_gathered = min(PREFETCHED_BLOCKS, stages.blocks) if parallel.reshard_after_forward else stages.blocks
        gathered = _complete_bytes(root, parallel) + num_gathered * _complete_bytes(block, parallel)
        # The head's gradient is kept until the embedding's is ready; a block's is copied to the reduce-scatter buffer.
        unreduced = _complete_bytes([*root, *block], parallel, trained=True)
        unreduced += 4 * sum(parameter.numel() for parameter in block if parameter.requires_grad)
    if parallel.strategy == "diloco":
        copies = 2 + (parallel.delta_dtype is not None or parallel.delta_rank is not None)
        outer = 4 * copies * sum(count * parameter.numel() for parameter, count in trained)
    is_ddp = parallel.strategy != "diloco" and layout.dp_replicate == layout.world_size > 1
    return Holdings(
        weights=_local_bytes(held, shards, device_type),
        gradients=_local_bytes(trained, shards, device_type),
        states=sum(count * states.get(parameter, 0) for parameter, count in held),
        temporaries=temporaries,
        keeps_gradients=is_ddp,
        on_host=parallel.cpu_offload,
        gathered=gathered,
        unreduced=unreduced,
        always={"outer parameters and momenta": outer},
    )


def _local_bytes(held: Iterable[tuple[nn.Parameter, int]], shards: int, device_type: str) -> int:
    """Bytes that a rank allocates for its shards of the parameters; `held` has the count of each."""
    total = 0
    for parameter, count in held:
        if isinstance(parameter, QuantizedWeight):  # complete on every rank
            sizes = [part.nbytes for part in (parameter.codes, parameter.scales)]
        else:
            sizes = [parameter.itemsize * local_numel(parameter, shards)]
        total += count * sum(allocated_bytes(size, device_type) for size in sizes)
    return total


def _complete_bytes(parameters: Iterable[nn.Parameter], parallel: ParallelConfig, *, trained: bool = False) -> int:
    """Bytes of the parameters that FSDP gathers, or of their gradients; it does not gather quantized weights."""
    return sum(
        parameter.numel() * (parameter.itemsize if parallel.param_dtype is None else 2)
        for parameter in parameters
        if not isinstance(parameter, QuantizedWeight) and (parameter.requires_grad or not trained)
    )


def _root_parameters(model: GPT, stages: _Stages) -> list[nn.Parameter]:
    """The parameters outside the blocks; a tied head is held by the first and by the last rank of a pipeline."""
    first = [module for name, module in model.transformer.items() if name not in ("h", "ln_f")]
    last = [model.transformer["ln_f"], model.lm_head]
    modules = (first if stages.is_first else []) + (last if stages.is_last else [])
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


def local_numel(tensor: Tensor, shards: int) -> int:
    """Elements of the largest shard of a tensor that FSDP splits by rows."""
    rows = tensor.shape[0] if tensor.ndim else 1
    return -(-rows // shards) * (tensor.numel() // rows)


def resolve_strategy(config: RunConfig) -> RunConfig:
    """Replace `parallel.strategy = "auto"` with the cheapest strategy that fits the devices, and say why."""
    if config.parallel.strategy != "auto":
        return config
    world_size = launched_processes()
    if world_size == 1:
        return replace(config, parallel=ParallelConfig())
    ranks_per_node, device = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), choose_device(config.train.device)
    memory = total_memory(device, ranks_per_node)
    parallel, reason = choose_strategy(config, world_size, ranks_per_node, memory, device.type, peak_flops(device))
    if os.environ.get("RANK") == "0":
        logger.info("Strategy (auto): %s", reason)
    return replace(config, parallel=parallel)


def choose_strategy(
    config: RunConfig, world_size: int, ranks_per_node: int, memory: int, device_type: str, flops: float | None = None
) -> tuple[ParallelConfig, str]:
    """The cheapest layout whose predicted memory fits `memory` bytes per device, and why in one line."""
    network = replace(CPU_NETWORK if device_type == "cpu" else Network(), ranks_per_node=ranks_per_node)
    if flops is not None:
        network = replace(network, flops=0.4 * flops)
    _check(config)
    plans: list[_Plan] = []
    impossible: list[ConfigError] = []
    for parallel in _candidates(config, world_size, ranks_per_node):
        try:
            layout = resolve_layout(parallel, world_size, ranks_per_node)
            plans.append(_plan(config, parallel, layout, network, device_type))
        except ConfigError as error:
            impossible.append(error)
    if not plans:
        raise impossible[0]
    rejected: dict[_Plan, str] = {}

    def fits(plan: _Plan) -> bool:
        if plan.peak > MAX_MEMORY_FRACTION * memory:
            rejected[plan] = f"{plan.name} needs {format_bytes(plan.peak)}"
        return plan not in rejected

    # A prediction takes seconds, so only layouts that could be chosen are predicted.
    fastest = next((plan for plan in sorted(plans, key=lambda plan: plan.seconds) if fits(plan)), None)
    if fastest is None:
        raise ConfigError(
            f"parallel.strategy = auto: no layout of {world_size} ranks fits {format_bytes(memory)} per device "
            f"({'; '.join([*rejected.values()][-3:])}): use more devices, a smaller train.micro_batch or "
            "train.recompute = full"
        )
    chosen = next(plan for plan in plans if plan.seconds <= MAX_SLOWDOWN * fastest.seconds and fits(plan))
    needs = f"needs {format_bytes(chosen.peak)} of {format_bytes(memory)} per device and sends"
    reason = f"{chosen.name} {needs} {format_bytes(int(chosen.sent))} per step"
    return chosen.config.parallel, "; ".join([reason, *[*rejected.values()][:2]])


@dataclass(frozen=True, eq=False)
class _Plan:
    """A layout that `auto` considers."""

    config: RunConfig
    layout: Layout
    device_type: str
    seconds: float
    sent: float
    """Bytes per step."""

    @property
    def name(self) -> str:
        strategy = self.config.parallel.strategy
        return str(strategy) if self.layout.tp * self.layout.pp == 1 else f"{strategy} ({self.layout})"

    @cached_property
    def peak(self) -> int:
        """Predicted bytes of the rank that needs the most."""
        return max(rank.peak for rank in predict_pipeline_ranks(self.config, self.layout, self.device_type))


def _plan(config: RunConfig, parallel: ParallelConfig, layout: Layout, network: Network, device_type: str) -> _Plan:
    config = replace(resolve(config, device_type, layout.dp), parallel=parallel)
    _local_architecture(config.model, layout.tp)  # raise if the model cannot be divided this way
    list(_pipeline_ranks(config, layout))
    work = _workload(config)
    sent = sum(traffic(work, layout, parallel).values())
    return _Plan(config, layout, device_type, step_seconds(work, layout, parallel, network), sent)


def _candidates(config: RunConfig, world_size: int, ranks_per_node: int) -> Iterator[ParallelConfig]:
    """Layouts to consider: replicas, shards, then shards with layers split over more and more ranks."""
    base = replace(config.parallel, strategy="auto")
    if not any(getattr(base, name) is not None for name in ("dp_shard", "tp", "pp")):
        unset = {"reshard_after_forward": True, "cpu_offload": False, "param_dtype": None, "pipeline_schedule": "1f1b"}
        yield replace(base, strategy="ddp", **unset)  # type: ignore[arg-type]
    for pp in (2**i for i in range(world_size.bit_length())):
        for tp in (2**i for i in range(ranks_per_node.bit_length())):
            wanted = (base.tp in (None, tp)) and (base.pp in (None, pp))
            if wanted and tp * pp <= world_size and world_size % (tp * pp) == 0 and pp <= config.model.num_layers:
                schedule = base.pipeline_schedule if pp > 1 else "1f1b"
                yield replace(base, strategy="fsdp", tp=tp, pp=pp, pipeline_schedule=schedule)


def _workload(config: RunConfig) -> Workload:
    return Workload(
        parameters=config.model.matrix_parameters,
        layers=config.model.num_layers,
        width=config.model.embd_size,
        tokens=(config.train.micro_batch or 1) * config.sequence_length,
        micro_batches=config.train.accumulation or 1,
        param_bytes=2 if config.parallel.param_dtype is not None else 4,
        activation_bytes=4 if config.train.precision == "fp32" else 2,
        recompute=config.train.recompute == "full",
    )
