"""Jobs for test_resharding.py and scripts/reshard: train, save, and continue on other ranks, without a trainer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whimbrel.checkpoint import CheckpointManager, SharingPattern, StateComponent
from whimbrel.distributed import (
    ParallelConfig,
    apply_tensor_parallel,
    gradient_norm,
    join_world,
    shard_or_replicate,
    unwrap,
)
from whimbrel.distributed.state import full_tensor
from whimbrel.models import GPT, GPTConfig
from whimbrel.optim import (
    Apollo,
    ApolloMini,
    Fira,
    LDAdam,
    OptimConfig,
    QGaLore,
    build_optimizer,
    classify_parameters,
)
from whimbrel.train.checkpointing import model_state
from whimbrel.train.optimizer_state import OptimizerState

CPU = torch.device("cpu")
BATCH, LENGTH, VOCAB = 24, 8, 96
MODEL = GPTConfig(
    num_layers=2, num_heads=2, embd_size=68, vocab_size=VOCAB, context_length=LENGTH, tied_head=False, gated_mlp=True,
    activation="silu",
)  # fmt: skip
"""68 rows: ranks have shards of different sizes, and with 8 ranks of 9 rows the last one has 5. With 68 x 204 numbers,
moments are stored in 8 bits where the optimizer does so."""
BEFORE, AFTER = 4, 4
"""Steps before and after the checkpoint. With gap = 3, bases are refreshed in both."""
LOW_RANK = {"rank": 4, "gap": 3}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw8bit": {},
    "muon": {"neuron_beta": 0.9},
    "galore": LOW_RANK | {"projection_type": "right"},
    "galore_warm": LOW_RANK,
    "galore_warm_int8": LOW_RANK | {"store": "int8", "basis_store": "int8"},
    "qgalore": LOW_RANK,
    "apollo": LOW_RANK,
    "apollo_mini": {"gap": 3},
    "fira": LOW_RANK,
    "ldadam": {"rank": 4},
}
CLASSES = {"qgalore": QGaLore, "apollo": Apollo, "apollo_mini": ApolloMini, "fira": Fira, "ldadam": LDAdam}
"""Optimizers that project the shorter side by default, which FSDP2 may have sharded: here they project columns."""
Run = tuple[list[float], str]
"""Losses, and a digest of the final weights."""


def train(
    run: Path | None, settings: dict[str, Any], optimizer_name: str, dtype: str = "float32", *, resume: bool = False
) -> Run:
    """Train and save; with `resume`, load and continue. Without `run`, train all steps."""
    config = ParallelConfig(**settings)
    world = join_world(config, "cpu")
    torch.manual_seed(0)
    model: nn.Module = GPT(MODEL).to(getattr(torch, dtype))
    if world.layout.tp > 1:
        assert world.mesh is not None
        apply_tensor_parallel(model, world.mesh["tp"])
    model = shard_or_replicate(model, world, config, CPU)
    inner = unwrap(model)
    optimizer = make_optimizer(optimizer_name, inner)
    state = OptimizerState(optimizer, inner, world)
    pattern = SharingPattern.SHARDED if state.is_sharded else SharingPattern.GLOBAL
    components = [
        StateComponent("model", model_state(inner), SharingPattern.GLOBAL),
        StateComponent("optimizer", state, pattern),
    ]
    manager = None if run is None else CheckpointManager(run, world=world, asynchronous=True)
    if resume:
        assert manager is not None
        manager.load(components)
    steps = range(BEFORE + AFTER) if run is None else range(BEFORE, BEFORE + AFTER) if resume else range(BEFORE)
    share = slice(world.dp_rank * BATCH // world.dp_size, (world.dp_rank + 1) * BATCH // world.dp_size)
    losses = []
    for step in steps:
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))[share]
        num_items = torch.tensor(BATCH * LENGTH / world.dp_size)
        loss = model(tokens[:, :-1], targets=tokens[:, 1:], num_items_in_batch=num_items).loss
        loss.backward()
        gradient_norm(list(model.parameters()), world)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(world.all_reduce_dp(loss.detach().float()) / world.dp_size))
    if manager is not None and not resume:
        manager.save(BEFORE, components)
        manager.wait()
    if manager is not None:
        manager.close()
    return losses, digest([full_tensor(parameter.detach()) for parameter in inner.parameters()])


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    options, parameters = OPTIMIZERS[name], classify_parameters(model)
    if name not in CLASSES:
        config = OptimConfig(name=name.removesuffix("_int8"), lr=5e-3, **options)  # type: ignore[arg-type]
        return build_optimizer(config, parameters)
    groups: list[dict[str, Any]] = [
        {"params": [], "names": [], "side": "right"},
        {"params": [], "names": [], "rank": None},
    ]
    for item in parameters:
        group = groups[item.role != "hidden"]
        group["params"].append(item.parameter)
        group["names"].append(item.name)
    return CLASSES[name](groups, lr=5e-3, **options)


def resume(run: Path, settings: dict[str, Any], optimizer_name: str, dtype: str = "float32") -> Run:
    return train(run, settings, optimizer_name, dtype, resume=True)


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
