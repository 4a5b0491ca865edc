"""The work of two gloo processes with composed optimizers, and of the single process they are compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from whimbrel.base.errors import WhimbrelError
from whimbrel.optim import (
    AdamW8bit,
    Apollo,
    ApolloMini,
    Fira,
    GaLore,
    GaLoreWarm,
    LDAdam,
    LowRankOptimizer,
    QGaLore,
    check_replicas,
    project_in_backward,
    step_in_backward,
)  # fmt: skip

RANKS, BATCH, STEPS = 2, 32, 14
Make = Callable[[Iterable[Tensor]], LowRankOptimizer | GaLore]
RIGHT = {"side": "right"}
LOW = {"lr": 1e-3, "rank": 4, "gap": 4}
GALORE = {"lr": 1e-3, "rank": 4, "update_proj_gap": 4, "scale": 1.0, "weight_decay": 0.1}
CALM = {"eps": 1e-4}
"""Else Adam makes as much of how a number near zero was rounded as of any other, and two runs soon differ."""
ON_SHARDS: dict[str, Make] = {
    "warm, turned": lambda ps: GaLoreWarm(ps, **LOW | CALM, weight_decay=0.1),
    "warm, aligned, lazy": lambda ps: GaLoreWarm(ps, **LOW | CALM, moment_transfer="align", lazy=True, start="random"),
    "warm sgd, transported": lambda ps: LowRankOptimizer(ps, **LOW, rule="sgd", moment_transfer="both"),
    "warm lion": lambda ps: LowRankOptimizer(ps, **LOW | {"lr": 1e-4}, rule="lion"),
    "svd": lambda ps: LowRankOptimizer(ps, **LOW | CALM, subspace="svd"),
    "no subspace": lambda ps: GaLoreWarm(ps, **LOW | CALM | {"rank": None}, weight_decay=0.1),
    "apollo": lambda ps: Apollo([{"params": ps} | RIGHT], **LOW | CALM),
    "apollo_mini": lambda ps: ApolloMini([{"params": ps} | RIGHT], lr=1e-3, gap=4, scale=1.0, **CALM),
    "fira": lambda ps: Fira(whole_row(ps), **LOW | CALM),
    "muon for stacks, from the left": lambda ps: LowRankOptimizer(stacks_apart(ps, rule="muon", side="left"), **LOW),
    "ldadam": lambda ps: LDAdam([{"params": ps} | RIGHT], lr=1e-4, rank=4, **CALM),
    "galore": lambda ps: galore(ps, "std"),
    "galore, reversed": lambda ps: galore(ps, "reverse_std"),
    "galore, right": lambda ps: galore(ps, "right"),
    "galore, left": lambda ps: galore(ps, "left"),
    "galore, full": lambda ps: galore(ps, "full"),
    "galore without a rank": lambda ps: GaLore(ps, **GALORE | CALM | {"rank": None}),
}
REPLICATED: dict[str, tuple[Make, torch.dtype]] = {
    "galore_warm": (lambda ps: GaLoreWarm(ps, **LOW, lazy=True), torch.float32),
    "qgalore": (lambda ps: QGaLore(ps, **LOW), torch.float32),
    "apollo": (lambda ps: Apollo(ps, **LOW), torch.float32),
    "bf16, rounded by chance": (lambda ps: GaLoreWarm(ps, **LOW, store="int8"), torch.bfloat16),
}


def whole_row(params: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Groups for Fira: the matrix of one row has no subspace, which would leave out nothing but what rounding does."""
    known = [*params]
    return [{"params": known[:-2]} | RIGHT, {"params": known[-2:], "rank": None}]


def stacks_apart(params: Iterable[Tensor], **settings: Any) -> list[dict[str, Any]]:
    """Groups with settings of their own for stacks, whose matrices are whole on one rank or another."""
    known = [*params]
    return [{"params": [p for p in known if p.ndim == 3]} | settings, {"params": [p for p in known if p.ndim != 3]}]


def galore(params: Iterable[Tensor], projection_type: str = "left") -> GaLore:
    """The matrix of one row has no subspace: what one singular vector leaves of it is what rounding does."""
    known = [*params]
    groups = [{"params": known[:-2]}, {"params": known[-2:], "rank": None}]
    return GaLore(groups, **GALORE | {"eps": 1e-2}, projection_type=projection_type)


def warm(params: Iterable[Tensor]) -> LowRankOptimizer:
    return GaLoreWarm(params, **LOW | CALM)


def in_bytes(params: Iterable[Tensor]) -> LowRankOptimizer:
    return GaLoreWarm(params, **LOW | CALM, store="int8", basis_store="int4")


class Experts(nn.Module):
    """A stack of three matrices: two for one rank, one for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 10) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh().sum(dim=0)


def model() -> nn.Sequential:
    """Rows that two ranks share unevenly, one row that one of them has alone, vectors, and one matrix of 4320."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(60, 72), nn.Tanh(), nn.Linear(72, 33), nn.Tanh(), nn.Linear(33, 16), Experts(), nn.LayerNorm(10),
        nn.Linear(10, 1),
    )  # fmt: skip


def loss_of(net: nn.Module, step: int, rows: slice, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(BATCH, 60, generator=generator), torch.randn(BATCH, 1, generator=generator)
    loss: Tensor = (net(x[rows].to(dtype)).float() - y[rows]).square().mean()
    return loss


def train(net: nn.Module, optimizer: Any, steps: range, rows: slice = slice(None), **more: Any) -> None:
    for step in steps:
        loss_of(net, step, rows, **more).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_projecting(net: nn.Module, optimizer: Any, steps: range, micro: list[slice], longest: float) -> list[float]:
    """With accumulation and clipping; the norms."""
    norms = []
    for step in steps:
        for rows in micro:
            with net.no_sync() if isinstance(net, DistributedDataParallel) else nullcontext():
                (loss_of(net, step, rows) / len(micro)).backward()
        norms.append(float(norm := optimizer.grad_norm()))
        optimizer.clip_(longest, norm)
        optimizer.step()
        optimizer.zero_grad()
    return norms


def cut(count: int, of: int = 1, rank: int = 0) -> list[slice]:
    """The micro-batches of a rank, `count` of them: `of` ranks take turns, so that all rows together are the batch."""
    size = BATCH // (count * of)
    return [slice(size * (of * i + rank), size * (of * i + rank + 1)) for i in range(count)]


def sharded(replicas: int = 1) -> nn.Module:
    sizes = (replicas, RANKS // replicas)
    net, mesh = model(), init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards"))
    for part in (net[0], net[5], net):
        fully_shard(part, mesh=mesh if replicas > 1 else mesh["shards"])
    return net


def everything(net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of weights and state, whole, by name."""
    found = {}
    for name, parameter in net.named_parameters():
        for kind, tensor in {"weight": parameter.detach(), **optimizer.state[parameter]}.items():
            found[f"{name} {kind}"] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
    return found


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except WhimbrelError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def replicas(rank: int) -> dict[str, Any]:
    """DDP as it is; what every rank has in the end, and what the check says when one basis is nudged."""
    answer: dict[str, Any] = {}
    for name, (make, dtype) in REPLICATED.items():
        net = model().to(dtype)
        optimizer = make(net.parameters())
        train(DistributedDataParallel(net), optimizer, range(STEPS), cut(1, RANKS, rank)[0], dtype=dtype)
        check_replicas(optimizer)
        answer[name] = everything(net, optimizer)
    net = model()
    optimizer = warm(net.named_parameters())
    if rank == 1:
        optimizer.state[net[2].weight]["basis"].view(-1)[7] += 1e-7
    return answer | {"nudged": refusal(lambda: check_replicas(optimizer))}


@contextmanager
def counting(counts: list[int]) -> Iterator[None]:
    """How many numbers each all-reduce takes."""
    reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield
    finally:
        dist.all_reduce = reduce


def projections(rank: int) -> dict[str, Any]:
    """Ranks that average R: by hooks, by linear layers, under DDP; what travels; gradients that one rank lacks."""
    answer: dict[str, Any] = {}
    for kind in ("hooks", "linears", "ddp"):
        net = model()
        settings = {"model": net} if kind == "linears" else {}
        optimizer = project_in_backward(
            warm(net.parameters()), accumulation=2, process_group=dist.group.WORLD, **settings
        )
        wrapped = DistributedDataParallel(net) if kind == "ddp" else net
        norms = train_projecting(wrapped, optimizer, range(STEPS), cut(2, RANKS, rank), 0.05)
        check_replicas(optimizer)
        answer[kind] = everything(net, optimizer) | {"norms": torch.tensor(norms)}
    net = model()
    optimizer = project_in_backward(warm(net.parameters()), process_group=dist.group.WORLD)
    answer["sent"] = []
    for step in (0, 1):
        with counting(sent := []):
            train(net, optimizer, range(step, step + 1), cut(1, RANKS, rank)[0])
        answer["sent"].append(sent)
    train(net, optimizer, range(2, STEPS), cut(1, RANKS, rank)[0])
    answer["whole batch"] = everything(net, optimizer)
    torch.manual_seed(0)
    routes = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])  # of both ranks, of one, of none
    optimizer = project_in_backward(warm(routes.parameters()), process_group=dist.group.WORLD)
    x = torch.randn(16, 8)
    for _ in range(3):
        sum(layer(x).square().mean() for layer in [*routes][: 2 - rank]).backward()
        optimizer.grad_norm()
        optimizer.step()
    answer["routes"] = everything(routes, optimizer)
    routes[0](x).sum().backward()
    optimizer.grad_norm()
    answer["late"] = refusal(lambda: routes[0](x).sum().backward())
    answer["no group"] = refusal(lambda: project_in_backward(warm(model().parameters())))
    answer["steps"] = refusal(lambda: step_in_backward(warm(model().parameters())))
    return answer


def shards(rank: int) -> dict[str, Any]:
    """FSDP2, with every choice that knows of shards; a step that is not finite on one rank; what is refused."""
    rows = cut(1, RANKS, rank)[0]
    answer: dict[str, Any] = {}
    for name, make in ON_SHARDS.items():
        net = sharded()
        optimizer = make(net.parameters())
        train(net, optimizer, range(STEPS), rows)
        check_replicas(optimizer)
        answer[name] = everything(net, optimizer)
    net = sharded(replicas=RANKS)
    optimizer = warm(net.parameters())
    train(net, optimizer, range(STEPS), rows)
    answer["replicas"] = everything(net, optimizer)
    net = sharded()
    optimizer = project_in_backward(warm(net.parameters()))
    norms = train_projecting(net, optimizer, range(STEPS), [rows], 0.05)
    answer["in backward"] = everything(net, optimizer) | {"norms": torch.tensor(norms)}
    answer["placements"] = {
        name: str(getattr(t, "placements", "")) for name, t in optimizer.state[net[0].weight].items()
    }
    loss_of(net, 0, rows).backward()
    if rank == 1:
        net[4].bias.grad.to_local().fill_(float("nan"))
    before = everything(net, optimizer)
    optimizer.step()
    answer["skipped"] = optimizer.optimizer.skipped
    answer["moved"] = [
        name for name, tensor in everything(net, optimizer).items() if not torch.equal(tensor, before[name])
    ]
    reference = galore(net.parameters())
    reference.step()
    answer["galore skipped"] = reference.skipped
    answer["galore placements"] = {
        projection_type: {
            name: str(getattr(t, "placements", ""))
            for name, t in galore(net.parameters(), projection_type).state[net[0].weight].items()
        }
        for projection_type in ("right", "left", "full")
    }
    params, mesh = [*net.parameters()], init_device_mesh("cpu", (RANKS,))
    columns = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    vector = nn.Parameter(distribute_tensor(torch.ones(4100), mesh, [Shard(0)]))
    refused: dict[str, Callable[[], Any]] = {
        "side": lambda: QGaLore(params),
        "rule": lambda: LowRankOptimizer(params, rule="muon", rank=4),
        "columns": lambda: warm([columns]),
        "columns of galore": lambda: GaLore([columns], rank=2),
        "vector": lambda: AdamW8bit([vector]),
        "model": lambda: project_in_backward(warm(params), model=net),
        "group": lambda: project_in_backward(warm(params), process_group=dist.group.WORLD),
    }
    return answer | {"refused": {name: refusal(act) for name, act in refused.items()}}


def save(folder: Path, net: nn.Module, optimizer: Any) -> None:
    dcp.save({"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder)


def load(folder: Path, net: nn.Module, optimizer: Any) -> None:
    state = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    set_optimizer_state_dict(net, optimizer, state["optim"])


def checkpoints(rank: int, run: Path) -> dict[str, Any]:
    """Saved by two and by one, taken up by two."""
    rows, half = cut(1, RANKS, rank)[0], STEPS // 2
    answer: dict[str, Any] = {}
    for name, make in (("warm", warm), ("in bytes", in_bytes), ("galore", galore)):
        begun = sharded()
        optimizer = make(begun.parameters())
        train(begun, optimizer, range(half), rows)
        save(run / f"two {name}", begun, optimizer)
        answer[f"{name} saved"] = everything(begun, optimizer)
        train(begun, optimizer, range(half, STEPS), rows)
        answer[f"{name} unbroken"] = everything(begun, optimizer)
        for source in ("one", "two"):
            net = sharded()
            optimizer = make(net.parameters())
            load(run / f"{source} {name}", net, optimizer)
            answer[f"{name} loaded from {source}"] = everything(net, optimizer)
            train(net, optimizer, range(half, STEPS), rows)
            answer[f"{name} resumed from {source}"] = everything(net, optimizer)
        alone = model()
        taken, given = make(alone.parameters()), make((net := sharded()).parameters())
        taken.load_state_dict(optimizer.state_dict())
        given.load_state_dict(taken.state_dict())
        answer[f"{name} there and back"] = everything(net, given)
        options = StateDictOptions(full_state_dict=True)
        whole = get_optimizer_state_dict(net, given, options=options)
        assert not any(isinstance(tensor, DTensor) for state in whole["state"].values() for tensor in state.values())
        fresh = make((net := sharded()).parameters())
        set_optimizer_state_dict(net, fresh, whole, options=options)
        answer[f"{name} by way of whole tensors"] = everything(net, fresh)
    return answer


def work(rank: int, run: Path, port: int) -> None:
    """Everything, in each process; the answers are files."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    parts = {"replicas": replicas(rank), "projections": projections(rank), "shards": shards(rank)}
    torch.save(parts | {"checkpoints": checkpoints(rank, run)}, run / f"{rank}.pt")
    dist.barrier()  # nobody leaves while another still talks to it
    dist.destroy_process_group()
