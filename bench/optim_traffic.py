"""Bytes that data-parallel ranks all-reduce per step: DDP, and galore_warm that averages projected gradients.

    python bench/optim_traffic.py --out bench/results/optim-traffic.json

Counted over two refresh gaps after the first bases, on a chain of four matrices of the widths in a GPT block, with gloo
on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor, nn

from record import record
from whimbrel.optim import GaLoreWarm, project_in_backward

RANKS = 2
dist: Any = torch.distributed  # its functions are replaced to count
mp: Any = torch.multiprocessing


def run(rank: int, store: str, width: int, low_rank: int, gap: int, results: Any) -> None:
    """Train one block on random inputs and count the bytes of every all-reduce."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    sizes = [(width, 3 * width), (3 * width, width), (width, 4 * width), (4 * width, width)]
    net = nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in sizes))
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(rank))
    sent, all_reduce = [0], dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += tensor.nbytes
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    optimizer = project_in_backward(
        GaLoreWarm(net.parameters(), rank=low_rank, gap=gap), process_group=dist.group.WORLD
    )
    for step in range(2 * gap + 1):
        net(x).square().mean().backward()
        optimizer.clip_(1.0, optimizer.grad_norm())
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            sent[0] = 0
    if rank == 0:
        full = sum(p.nbytes for p in net.parameters())  # DDP all-reduces every gradient once a step
        projected = sum(4 * m * low_rank for _, m in sizes)
        results.update({"ddp": full, "projected": sent[0] / (2 * gap), "r/n": projected / full})
    dist.destroy_process_group()


def main() -> None:
    """Count, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = []
    for width, low_rank, gap in ((512, 64, 10), (768, 128, 10), (768, 64, 10)):
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            results = manager.dict()
            mp.spawn(run, (f"{folder}/store", width, low_rank, gap, results), nprocs=RANKS)
            row: dict[str, Any] = {"width": width, "rank": low_rank, "gap": gap, **results}
        row["share"] = row["projected"] / row["ddp"]
        print(f"width {width}, rank {low_rank}: {row['share']:.1%} of DDP, r/n {row['r/n']:.1%}")
        found.append(row)
    record("optim-traffic", {"bytes_per_step": found}, args.out)


if __name__ == "__main__":
    main()
