"""Code that test_precision.py runs on two gloo ranks, and on one process for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from whimbrel.models import GPT, GPTConfig
from whimbrel.precision import MixedPrecision, prepare

RANKS, ROWS, STEPS = 2, 2, 6
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "int8-dynamic-act-int4-weight", "int4-weight-only")


def model(recipe: str) -> GPT:
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=64, context_length=16, num_layers=2, num_heads=2, embd_size=128))
    prepare(gpt, recipe)
    return gpt


def train(gpt: nn.Module, shares: Sequence[int]) -> list[float]:
    """Train on the given shares of each batch, one micro-batch per share; returns the mean loss of each step."""
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(64, (RANKS, ROWS, 17), generator=torch.Generator().manual_seed(step))
        losses_of_shares = [
            gpt(tokens[share, :, :-1], targets=tokens[share, :, 1:]).loss / len(shares) for share in shares
        ]
        for loss in losses_of_shares:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in losses_of_shares))
    return losses


def weights(gpt: nn.Module) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in gpt.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        tensors[name] = full.detach().clone()
    return tensors


def single_process(recipe: str) -> dict[str, Tensor]:
    """Train in a single process on the complete batches."""
    gpt = model(recipe)
    losses = train(gpt, range(RANKS))
    return {"losses": torch.tensor(losses), **weights(gpt)}


def run_rank(folder: Path) -> None:
    """Train each recipe under FSDP2 and save losses and weights to RANK.pt."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (RANKS,))
    results = {}
    for recipe in RECIPES:
        gpt = model(recipe)
        for part in (*gpt.blocks, gpt):
            fully_shard(part, mesh=mesh)
        losses = torch.tensor(train(gpt, [rank]))
        dist.all_reduce(losses)
        results[recipe] = {"losses": losses / RANKS, **weights(gpt)}
    torch.save(results, folder / f"{rank}.pt")


def scaled_steps() -> list[tuple[bool, float]]:
    """Steps of an fp16 run under FSDP2: all gradients finite, then an infinite one in the shard of rank 1."""
    net = nn.Linear(4, 4, bias=False)
    fully_shard(net, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    precision, found = MixedPrecision("fp16", torch.device("cpu")), []
    for overflows in (False, True, False):
        precision.scale(net(torch.ones(2, 4)).sum()).backward()
        grad = net.weight.grad
        assert isinstance(grad, DTensor)
        if overflows and dist.get_rank() == 1:
            grad.to_local().fill_(torch.inf)
        precision.unscale(optimizer)
        stepped = precision.step(optimizer)
        assert precision.scaler is not None
        found.append((stepped, precision.scaler.get_scale()))
        optimizer.zero_grad()
    return found
