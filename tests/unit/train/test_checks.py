"""Several processes and models wrapped for several devices raise an error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from whimbrel.base.errors import ConfigError
from whimbrel.config import dump_toml, to_table
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


@pytest.mark.parametrize("kind", [BaseTrainer, Trainer, None])
def test_several_processes_raise(
    kind: type, args: Make, net: Make, data: Make, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> None:
        Trainer.from_config(make_run()) if kind is None else kind(args(), net(), train_dataset=data())

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="distributed training is not supported yet: .* got WORLD_SIZE=2$"):
        build()
    monkeypatch.setenv("WORLD_SIZE", "1")
    build()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(ConfigError, match="got a process group of 3$"):
        build()


def test_torchrun_with_two_processes_fails_with_one_line_each(make_run: MakeRun, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_toml(to_table(make_run())))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    done = subprocess.run(
        [*launch, "-m", "whimbrel", "train", str(recipe)], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "distributed training is not supported yet" in done.stderr
    assert not (tmp_path / "run").exists()


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
    with pytest.raises(ConfigError, match=f"distributed training is not supported yet: expected .* got a {kind}"):
        Trainer(args(), nn.Sequential(model), train_dataset=data())
    trainer = Trainer(args(), model_init=lambda: model, train_dataset=data())
    with pytest.raises(ConfigError, match="distributed training is not supported yet"):
        trainer.train()
