"""Code that test_optim.py runs on two gloo ranks, and on one process for comparison."""

from __future__ import annotations

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
from whimbrel.distributed import check_replicas
from whimbrel.optim import (
    AdamW8bit,
    Apollo,
    ApolloMini,
    Fira,
    GaLore,
    GaLoreWarm,
    LDAdam,
    LowRankOptimizer,
    Muon,
    QGaLore,
    muon,
    project_in_backward,
    step_in_backward,
)  # fmt: skip
from whimbrel.precision import quantize_

RANKS, BATCH, STEPS = 2, 32, 14
Make = Callable[[Iterable[Tensor]], LowRankOptimizer | GaLore]
RIGHT = {"side": "right"}
LOW = {"lr": 1e-3, "rank": 4, "gap": 4}
GALORE = {"lr": 1e-3, "rank": 4, "update_proj_gap": 4, "scale": 1.0, "weight_decay": 0.1}
STABLE_EPS = {"eps": 1e-4}
"""Adam normalizes elements near zero, so with a small eps it amplifies rounding errors and two runs diverge."""
ON_SHARDS: dict[str, Make] = {
    "warm": lambda ps: GaLoreWarm(ps, **LOW | STABLE_EPS, weight_decay=0.1),
    "warm, aligned, lazy": lambda ps: GaLoreWarm(
        ps, **LOW | STABLE_EPS, moment_transfer="align", lazy=True, start="random"
    ),
    "warm sgd, transferred": lambda ps: LowRankOptimizer(ps, **LOW, rule="sgd", moment_transfer="both"),
    "warm lion": lambda ps: LowRankOptimizer(ps, **LOW | {"lr": 1e-4}, rule="lion"),
    "svd": lambda ps: LowRankOptimizer(ps, **LOW | STABLE_EPS, subspace="svd"),
    "no subspace": lambda ps: GaLoreWarm(ps, **LOW | STABLE_EPS | {"rank": None}, weight_decay=0.1),
    "apollo": lambda ps: Apollo([{"params": ps} | RIGHT], **LOW | STABLE_EPS),
    "apollo_mini": lambda ps: ApolloMini([{"params": ps} | RIGHT], lr=1e-3, gap=4, scale=1.0, **STABLE_EPS),
    "fira": lambda ps: Fira(split_off_last_layer(ps), **LOW | STABLE_EPS),
    "muon for stacks, side left": lambda ps: LowRankOptimizer(separate_stacks(ps, rule="muon", side="left"), **LOW),
    "ldadam": lambda ps: LDAdam([{"params": ps} | RIGHT], lr=1e-4, rank=4, **STABLE_EPS),
    "galore": lambda ps: galore(ps, "std"),
    "galore, reversed": lambda ps: galore(ps, "reverse_std"),
    "galore, right": lambda ps: galore(ps, "right"),
    "galore, left": lambda ps: galore(ps, "left"),
    "galore, full": lambda ps: galore(ps, "full"),
    "galore without a rank": lambda ps: GaLore(ps, **GALORE | STABLE_EPS | {"rank": None}),
}
REPLICATED: dict[str, tuple[Make, torch.dtype]] = {
    "galore_warm": (lambda ps: GaLoreWarm(ps, **LOW, lazy=True), torch.float32),
    "qgalore": (lambda ps: QGaLore(ps, **LOW), torch.float32),
    "apollo": (lambda ps: Apollo(ps, **LOW), torch.float32),
    "bf16, stochastic rounding": (lambda ps: GaLoreWarm(ps, **LOW, store="int8"), torch.bfloat16),
}


def split_off_last_layer(params: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Groups for Fira. The one-row matrix gets no subspace: its residual would consist of rounding errors only."""
    known = [*params]
    return [{"params": known[:-2]} | RIGHT, {"params": known[-2:], "rank": None}]


def separate_stacks(params: Iterable[Tensor], **settings: Any) -> list[dict[str, Any]]:
    """A separate group for 3-D stacks, whose matrices are not split across ranks."""
    known = [*params]
    return [{"params": [p for p in known if p.ndim == 3]} | settings, {"params": [p for p in known if p.ndim != 3]}]


def galore(params: Iterable[Tensor], projection_type: str = "left") -> GaLore:
    """The one-row matrix gets no subspace: its residual would consist of rounding errors only."""
    known = [*params]
    groups = [{"params": known[:-2]}, {"params": known[-2:], "rank": None}]
    return GaLore(groups, **GALORE | {"eps": 1e-2}, projection_type=projection_type)


def warm(params: Iterable[Tensor]) -> LowRankOptimizer:
    return GaLoreWarm(params, **LOW | STABLE_EPS)


def low_bit(params: Iterable[Tensor]) -> LowRankOptimizer:
    return GaLoreWarm(params, **LOW | STABLE_EPS, store="int8", basis_store="int4")


class Experts(nn.Module):
    """A stack of three matrices, sharded as two and one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 10) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh().sum(dim=0)


def model() -> nn.Sequential:
    """Matrices that shard unevenly over two ranks, a one-row matrix, vectors, and a matrix of 4320 elements."""
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


def train_projecting(
    net: nn.Module, optimizer: Any, steps: range, micro: list[slice], max_norm: float, norm: float | None = None
) -> list[float]:
    """Train with accumulation and clipping, as if the gradient norm were `norm`; returns the gradient norms."""
    norms = []
    for step in steps:
        for rows in micro:
            with net.no_sync() if isinstance(net, DistributedDataParallel) else nullcontext():
                (loss_of(net, step, rows) / len(micro)).backward()
        norms.append(float(measured := optimizer.grad_norm()))
        optimizer.clip_(max_norm, measured if norm is None else torch.tensor(norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def micro_batches(count: int, of: int = 1, rank: int = 0) -> list[slice]:
    """The `count` micro-batches of a rank as row slices, interleaved over `of` ranks."""
    size = BATCH // (count * of)
    return [slice(size * (of * i + rank), size * (of * i + rank + 1)) for i in range(count)]


def sharded(replicas: int = 1) -> nn.Module:
    sizes = (replicas, RANKS // replicas)
    net, mesh = model(), init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards"))
    for part in (net[0], net[5], net):
        fully_shard(part, mesh=mesh if replicas > 1 else mesh["shards"])
    return net


def full_state(net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Copies of all parameters and optimizer state by name, as full tensors."""
    tensors = {}
    for name, parameter in net.named_parameters():
        for kind, tensor in {"weight": parameter.detach(), **optimizer.state[parameter]}.items():
            tensors[f"{name} {kind}"] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
    return tensors


def replicas(rank: int) -> dict[str, Any]:
    """Train under DDP; returns the final state and the error of check_replicas after one basis is changed."""
    results: dict[str, Any] = {}
    for name, (make, dtype) in REPLICATED.items():
        net = model().to(dtype)
        optimizer = make(net.parameters())
        train(DistributedDataParallel(net), optimizer, range(STEPS), micro_batches(1, RANKS, rank)[0], dtype=dtype)
        check_replicas(optimizer)
        results[name] = full_state(net, optimizer)
    layer = nn.Linear(64, 64, bias=False)
    nn.init.ones_(layer.weight)
    net = nn.ModuleDict({"layer": layer})
    quantize_(net, "int8", trainable=True)
    optimizer = AdamW8bit(layer.named_parameters())
    results["quantized"] = error_of(lambda: check_replicas(optimizer))
    if rank == 1:
        layer.weight.codes[3, 7] -= 1
    results["quantized, changed"] = error_of(lambda: check_replicas(optimizer))
    net = model()
    optimizer = warm(net.named_parameters())
    if rank == 1:
        optimizer.state[net[2].weight]["basis"].view(-1)[7] += 1e-7
    return results | {"nudged": error_of(lambda: check_replicas(optimizer))}


@contextmanager
def count_all_reduce(counts: list[int]) -> Iterator[None]:
    """Record the number of elements of each all-reduce."""
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
    """Projected gradients averaged over ranks: hooks, projected linears, DDP; sizes; missing gradients."""
    results: dict[str, Any] = {}
    for kind in ("hooks", "linears", "ddp"):
        net = model()
        settings = {"model": net} if kind == "linears" else {}
        optimizer = project_in_backward(
            warm(net.parameters()), accumulation=2, process_group=dist.group.WORLD, **settings
        )
        wrapped = DistributedDataParallel(net) if kind == "ddp" else net
        norms = train_projecting(wrapped, optimizer, range(STEPS), micro_batches(2, RANKS, rank), 0.05, norm=1.0)
        check_replicas(optimizer)
        results[kind] = full_state(net, optimizer) | {"norms": torch.tensor(norms)}
    net = model()
    optimizer = project_in_backward(warm(net.parameters()), process_group=dist.group.WORLD)
    results["communicated"] = []
    for step in (0, 1):
        with count_all_reduce(sent := []):
            train(net, optimizer, range(step, step + 1), micro_batches(1, RANKS, rank)[0])
        results["communicated"].append(sent)
    train(net, optimizer, range(2, STEPS), micro_batches(1, RANKS, rank)[0])
    results["full batch"] = full_state(net, optimizer)
    torch.manual_seed(0)
    routes = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])  # used on both ranks, on one, on none
    optimizer = project_in_backward(warm(routes.parameters()), process_group=dist.group.WORLD)
    x = torch.randn(16, 8)
    for _ in range(3):
        sum(layer(x).square().mean() for layer in [*routes][: 2 - rank]).backward()
        optimizer.grad_norm()
        optimizer.step()
        optimizer.zero_grad()
    results["routes"] = full_state(routes, optimizer)
    stacks = nn.ParameterList([torch.randn(2, 8, 8) for _ in range(2)])  # used on both ranks, on one
    stack_optimizer = project_in_backward(warm(stacks.parameters()), process_group=dist.group.WORLD)
    for _ in range(3):
        sum((x @ stack).square().mean() for stack in [*stacks][: 2 - rank]).backward()
        norm = stack_optimizer.grad_norm()
        stack_optimizer.step()
        stack_optimizer.zero_grad()
    results["stacks"] = full_state(stacks, stack_optimizer) | {"norm": norm}
    routes[0](x).sum().backward()
    optimizer.grad_norm()
    results["late"] = error_of(lambda: routes[0](x).sum().backward())
    results["no group"] = error_of(lambda: project_in_backward(warm(model().parameters())))
    results["steps"] = error_of(lambda: step_in_backward(warm(model().parameters())))
    return results


def shards(rank: int) -> dict[str, Any]:
    """Every optimizer that supports FSDP2; a non-finite gradient on one rank; unsupported settings."""
    rows = micro_batches(1, RANKS, rank)[0]
    results: dict[str, Any] = {}
    for name, make in ON_SHARDS.items():
        net = sharded()
        optimizer = make(net.parameters())
        train(net, optimizer, range(STEPS), rows)
        check_replicas(optimizer)
        results[name] = full_state(net, optimizer)
    net = sharded(replicas=RANKS)
    optimizer = warm(net.parameters())
    train(net, optimizer, range(STEPS), rows)
    results["replicas"] = full_state(net, optimizer)
    net = sharded()
    optimizer = project_in_backward(warm(net.parameters()))
    norms = train_projecting(net, optimizer, range(STEPS), [rows], 0.05)
    results["in backward"] = full_state(net, optimizer) | {"norms": torch.tensor(norms)}
    results["placements"] = {
        name: str(getattr(t, "placements", "")) for name, t in optimizer.state[net[0].weight].items()
    }
    loss_of(net, 0, rows).backward()
    if rank == 1:
        net[4].bias.grad.to_local().fill_(float("nan"))
    before = full_state(net, optimizer)
    optimizer.step()
    results["skipped"] = optimizer.optimizer.skipped
    results["changed"] = [
        name for name, tensor in full_state(net, optimizer).items() if not torch.equal(tensor, before[name])
    ]
    reference = galore(net.parameters())
    reference.step()
    results["galore skipped"] = reference.skipped
    results["galore placements"] = {
        projection_type: {
            name: str(getattr(t, "placements", ""))
            for name, t in galore(net.parameters(), projection_type).state[net[0].weight].items()
        }
        for projection_type in ("right", "left", "full")
    }
    params, mesh = [*net.parameters()], init_device_mesh("cpu", (RANKS,))
    columns = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    vector = nn.Parameter(distribute_tensor(torch.ones(4100), mesh, [Shard(0)]))
    unsupported: dict[str, Callable[[], Any]] = {
        "side": lambda: QGaLore(params),
        "rule": lambda: LowRankOptimizer(params, rule="muon", rank=4),
        "columns": lambda: warm([columns]),
        "columns of galore": lambda: GaLore([columns], rank=2),
        "vector": lambda: AdamW8bit([vector]),
        "model": lambda: project_in_backward(warm(params), model=net),
        "group": lambda: project_in_backward(warm(params), process_group=dist.group.WORLD),
    }
    return results | {"unsupported": {name: error_of(call) for name, call in unsupported.items()}}


def save(folder: Path, net: nn.Module, optimizer: Any) -> None:
    dcp.save({"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder)


def load(folder: Path, net: nn.Module, optimizer: Any) -> None:
    state = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    set_optimizer_state_dict(net, optimizer, state["optim"])


def checkpoints(rank: int, run: Path) -> dict[str, Any]:
    """Save on two ranks and on one; load on two."""
    rows, half = micro_batches(1, RANKS, rank)[0], STEPS // 2
    results: dict[str, Any] = {}
    for name, make in (("warm", warm), ("low bit", low_bit), ("galore", galore)):
        net = sharded()
        optimizer = make(net.parameters())
        train(net, optimizer, range(half), rows)
        save(run / f"two {name}", net, optimizer)
        results[f"{name} saved"] = full_state(net, optimizer)
        train(net, optimizer, range(half, STEPS), rows)
        results[f"{name} uninterrupted"] = full_state(net, optimizer)
        for source in ("one", "two"):
            net = sharded()
            optimizer = make(net.parameters())
            load(run / f"{source} {name}", net, optimizer)
            results[f"{name} loaded from {source}"] = full_state(net, optimizer)
            train(net, optimizer, range(half, STEPS), rows)
            results[f"{name} resumed from {source}"] = full_state(net, optimizer)
        unsharded = model()
        single, resharded = make(unsharded.parameters()), make((net := sharded()).parameters())
        single.load_state_dict(optimizer.state_dict())
        resharded.load_state_dict(single.state_dict())
        results[f"{name} round trip"] = full_state(net, resharded)
        options = StateDictOptions(full_state_dict=True)
        full_state_dict = get_optimizer_state_dict(net, resharded, options=options)
        assert not any(
            isinstance(tensor, DTensor) for state in full_state_dict["state"].values() for tensor in state.values()
        )
        fresh = make((net := sharded()).parameters())
        set_optimizer_state_dict(net, fresh, full_state_dict, options=options)
        results[f"{name} via full tensors"] = full_state(net, fresh)
    return results


def error_of(call: Callable[[], Any]) -> str:
    """The error that the call raises, as `Type: message`, or "no error"."""
    try:
        call()
    except WhimbrelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_rank(run: Path) -> None:
    """Run everything and save the results of this rank to RANK.pt."""
    rank = dist.get_rank()
    parts = {"replicas": replicas(rank), "projections": projections(rank), "shards": shards(rank)}
    torch.save(parts | {"checkpoints": checkpoints(rank, run)}, run / f"{rank}.pt")


class Block(nn.Sequential):
    """The matrices of a GPT block, as a chain."""

    def __init__(self, width: int) -> None:
        sizes = [(width, 3 * width), (3 * width, width), (width, 4 * width), (4 * width, width)]
        super().__init__(*(nn.Linear(n, m, bias=False) for n, m in sizes))


def traffic(width: int, rank: int, gap: int) -> tuple[int, int]:
    """Bytes that a rank all-reduces in 2 x `gap` steps after the first bases: with DDP, and averaging projections."""
    torch.manual_seed(0)
    net, sizes, steps = Block(width), [], 2 * gap
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    ddp = DistributedDataParallel(net)

    def count(bucket: dist.GradBucket) -> Any:
        sizes.append(bucket.buffer().nbytes)
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda found: found.value()[0])

    ddp.register_comm_hook(None, lambda _, bucket: count(bucket))
    ddp(x).square().mean().backward()
    full = sum(sizes) * steps
    net.zero_grad()
    optimizer = project_in_backward(GaLoreWarm(net.parameters(), rank=rank, gap=gap), process_group=dist.group.WORLD)
    reduced: list[int] = []
    for step in range(steps + 1):
        with count_all_reduce(reduced) if step else nullcontext():
            net(x).square().mean().backward()
            optimizer.clip_(1.0, optimizer.grad_norm())
            optimizer.step()
            optimizer.zero_grad()
    check_replicas(optimizer)
    return full, 4 * sum(reduced)


def orthogonalized(strategy: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Matrices that this rank orthogonalizes in a step of Muon, and weights after three steps."""
    net = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)), *(nn.Linear(12, 12, bias=False) for _ in range(2)))
    for index, parameter in enumerate(net.parameters()):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))
    if strategy == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    matrices = [p for p in net.parameters() if p.ndim == 2]
    groups = [
        {"params": matrices, "splits": [(7, 5), *[()] * 5]},  # one parameter is fused, of 7 and 5 rows
        {"params": [p for p in net.parameters() if p.ndim == 1], "rule": "adam"},
    ]
    optimizer = Muon(groups, lr=0.1, process_group=dist.group.WORLD if strategy == "ddp" else None, **settings)
    counts: list[int] = []
    x = torch.randn(RANKS * 3, 12, generator=torch.Generator().manual_seed(1))
    rank, share = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model_of_rank = DistributedDataParallel(net) if strategy == "ddp" else net
    with count_orthogonalized(counts):
        for _ in range(3):
            model_of_rank(x.chunk(share)[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return {"counts": sum(counts), "weights": [weight.detach().clone() for weight in weights]}


@contextmanager
def count_orthogonalized(counts: list[int]) -> Iterator[None]:
    """Record the number of matrices of each call of `orthogonalize`."""
    original = muon.orthogonalize

    def counted(matrices: Tensor) -> Tensor:
        counts.append(len(matrices))
        return original(matrices)

    muon.orthogonalize = counted
    try:
        yield
    finally:
        muon.orthogonalize = original
