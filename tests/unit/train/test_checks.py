"""Models wrapped for several devices, and half an environment of torchrun, raise an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from whimbrel.base.errors import ConfigError
from whimbrel.train import BaseTrainer, RunConfig, Trainer

Make = Callable[..., Any]
MakeRun = Callable[..., RunConfig]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group with one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_world_size_without_torchrun_raises(
    args: Make, net: Make, data: Make, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for build in (lambda: Trainer.from_config(make_run()), lambda: BaseTrainer(args(), net(), train_dataset=data())):
        with pytest.raises(ConfigError, match="WORLD_SIZE=2, but RANK, .* not set: start with torchrun"):
            build()
    monkeypatch.setenv("WORLD_SIZE", "1")
    Trainer.from_config(make_run())


def wrapped(kind: str, net: nn.Module) -> nn.Module:
    if kind == "DataParallel":
        return nn.DataParallel(net)
    if kind == "DistributedDataParallel":
        return nn.parallel.DistributedDataParallel(net)
    if kind == "FullyShardedDataParallel":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    if kind == "FSDPModule":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(net, mesh=mesh)
    net.layers[0].weight = nn.Parameter(distribute_tensor(net.layers[0].weight.detach(), mesh))
    return net


@pytest.mark.parametrize(
    "kind", ["DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel", "DTensor"]
)
@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:.*NO_SHARD")
@pytest.mark.usefixtures("group")
def test_wrapped_or_sharded_models_raise(kind: str, args: Make, net: Make, data: Make) -> None:
    model = wrapped(kind, net())
    with pytest.raises(ConfigError, match=f"expected .* got a {kind}"):
        Trainer(args(), nn.Sequential(model), train_dataset=data())
    trainer = Trainer(args(), model_init=lambda: model, train_dataset=data())
    with pytest.raises(ConfigError, match="expected .* set parallel.strategy"):
        trainer.train()
