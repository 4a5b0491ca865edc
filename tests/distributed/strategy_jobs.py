"""Jobs for test_strategy.py: a few training steps under a layout, without a trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from whimbrel.distributed.layout import ParallelConfig
from whimbrel.distributed.pipeline import (
    PipelineModel,
    find_ties,
    release_other_stages,
    split_layers,
    stage_indices,
)
from whimbrel.distributed.strategy import clip_gradients_, gradient_norm, gradient_sync, shard_or_replicate
from whimbrel.distributed.tensor_parallel import apply_tensor_parallel
from whimbrel.distributed.world import World, join_world
from whimbrel.models import GPT, GPTConfig
from whimbrel.models.gpt import GPTStage

CPU = torch.device("cpu")
STEPS, MICRO_BATCHES, BATCH, LENGTH, VOCAB = 6, 4, 8, 16, 96
SIZES = {"num_layers": 4, "num_heads": 4, "embd_size": 32, "vocab_size": VOCAB, "context_length": LENGTH}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"tied_head": True},
    "llama": {
        "position": "rope", "norm": "rms", "gated_mlp": True, "activation": "silu", "bias": "none",
        "num_kv_heads": 2, "qk_norm": "weighted", "tied_head": False,
    },
}  # fmt: skip
Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def make_model(kind: str) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**SIZES, **MODELS[kind]))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets (micro-batches, batch, tokens) of every step; some targets are ignored."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCAB, (MICRO_BATCHES, BATCH, LENGTH + 1), generator=generator)
        targets = tokens[..., 1:].clone()
        targets[0, :3, 5:] = -100
        found.append((tokens[..., :-1], targets))
    return found


def train(settings: dict[str, Any], kind: str) -> Curve:
    """Train under the layout of `settings` on the ranks of the process group."""
    config = ParallelConfig(**settings)
    world, model = join_world(config, "cpu"), make_model(kind)
    return _train_pipeline(world, config, model) if world.layout.pp > 1 else _train(world, config, model)


def train_alone(kind: str) -> Curve:
    return _train(World(), ParallelConfig(), make_model(kind))


def _train(world: World, config: ParallelConfig, model: nn.Module) -> Curve:
    if world.layout.tp > 1:
        assert world.mesh is not None
        apply_tensor_parallel(model, world.mesh["tp"])
    model = shard_or_replicate(model, world, config, CPU)
    parameters = list(model.parameters())
    optimizer, curve = torch.optim.AdamW(parameters, lr=1e-2), []
    share = slice(world.dp_rank * BATCH // world.dp_size, (world.dp_rank + 1) * BATCH // world.dp_size)
    for inputs, targets in batches():
        x, y = inputs[:, share], targets[:, share]
        num_items = world.sum_over_data((y != -100).sum()) / world.dp_size
        loss = torch.zeros(())
        for i in range(MICRO_BATCHES):
            with gradient_sync(model, last=i == MICRO_BATCHES - 1):
                part = model(x[i], targets=y[i], num_items_in_batch=num_items).loss
                part.backward()
                loss += part.detach()
        curve.append((float(world.sum_over_data(loss) / world.dp_size), _step(world, parameters, optimizer)))
    return curve


def _train_pipeline(world: World, config: ParallelConfig, model: GPT) -> Curve:
    assert world.mesh is not None
    rank, ties = world.mesh.get_local_rank("pp"), find_ties(model)
    indices = stage_indices(config.pipeline_schedule, rank, world.layout.pp)
    ranges = split_layers([1.0] * model.config.num_layers, world.layout.pp * len(indices), 0.5, 0.5)
    stages: list[nn.Module] = [GPTStage(model, ranges[index]) for index in indices]
    release_other_stages(model, stages)
    if world.layout.tp > 1:
        for stage in stages:
            apply_tensor_parallel(stage, world.mesh["tp"])
    stages = [shard_or_replicate(stage, world, config, CPU) for stage in stages]
    pipeline = PipelineModel(model, stages, ties, config.pipeline_schedule, MICRO_BATCHES, CPU, world.mesh)
    parameters = [parameter for parameter in model.parameters() if not parameter.is_meta]
    optimizer, curve = torch.optim.AdamW(parameters, lr=1e-2), []
    share = slice(world.dp_rank * BATCH // world.dp_size, (world.dp_rank + 1) * BATCH // world.dp_size)
    for inputs, targets in batches():
        x, y = inputs[:, share], targets[:, share]
        num_items = world.sum_over_data((y != -100).sum()) / world.dp_size
        micro_batches = [{"input_ids": x[i], "targets": y[i]} for i in range(MICRO_BATCHES)]
        loss = pipeline.forward_backward(micro_batches, num_items)
        curve.append((float(world.sum_over_data(loss) / world.dp_size), _step(world, parameters, optimizer)))
    return curve


def _step(world: World, parameters: list[Tensor], optimizer: torch.optim.Optimizer) -> float:
    norm = gradient_norm(parameters, world)
    clip_gradients_(parameters, 0.3, norm)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)
