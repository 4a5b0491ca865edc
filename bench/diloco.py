"""DiLoCo compared with DDP: held-out loss after equal tokens, and bytes sent by each worker.

    torchrun --standalone --nproc-per-node 4 bench/diloco.py --text TEXT_OR_PARQUET --out bench/results/diloco.json

All runs have the same initial weights, batches and tokens. DiLoCo is compared with the better of two DDP runs. Its
warm-up and outer optimizer follow shorter simulations on other text, in which more settings were tried for DiLoCo than
for DDP. Bytes are counted in the collective operations of the run (gradients, parameter deltas, losses, control), as in
a ring: an all-reduce of b bytes sends 2 (n - 1) / n b.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from record import record
from whimbrel.data.prepare import prepare
from whimbrel.data.sources import iter_documents
from whimbrel.distributed import ParallelConfig, join_world
from whimbrel.tokenization import train_tokenizer
from whimbrel.train import Trainer, TrainerCallback
from whimbrel.train.callbacks import ProgressCallback
from whimbrel.train.run_config import build_run_config

SEQUENCE, VOCABULARY = 32, 512
MODEL = {
    "context_length": SEQUENCE, "vocab_size": VOCABULARY, "num_layers": 2, "embd_size": 48, "num_heads": 4,
    "mlp_size": 96, "position": "rope", "norm": "rms", "gated_mlp": True, "activation": "silu", "bias": "none",
}  # fmt: skip
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"lr": 6e-3, "warmup": 1 / 15, "parallel": {"strategy": "ddp"}},
    "ddp_high_lr": {"lr": 1.2e-2, "warmup": 1 / 5, "parallel": {"strategy": "ddp"}},
    "diloco": {
        "lr": 6e-3, "warmup": 1 / 5,
        "parallel": {
            "strategy": "diloco", "sync_every": 50, "outer_lr": 0.8, "outer_momentum": 0.6, "delta_dtype": "int8",
        },
    },
}  # fmt: skip
"""`warmup`: fraction of the steps."""


class Counter:
    """Bytes that this rank sent."""

    sent = 0.0

    def wrap(self, function: Callable[..., Any], argument: int, factor: Callable[[int], float]) -> Callable[..., Any]:
        """`function`, counting its argument number `argument`."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.sent += factor(dist.get_world_size()) * args[argument].nbytes
            return function(*args, **kwargs)

        return counted


COUNTER = Counter()


def count_collectives() -> None:
    """Count the operations that are called from Python; DDP calls them in a hook."""
    c10d: Any = dist.distributed_c10d
    for name, argument, factor in (
        ("all_reduce", 0, lambda n: 2 * (n - 1) / n),
        ("all_to_all_single", 1, lambda n: (n - 1) / n),
        ("all_gather_into_tensor", 1, lambda n: n - 1),
        ("all_gather", 1, lambda n: n - 1),
        ("broadcast", 0, lambda n: 1.0),
    ):
        counted = COUNTER.wrap(getattr(c10d, name), argument, factor)
        setattr(c10d, name, counted)
        setattr(dist, name, counted)


class CountingTrainer(Trainer):
    """Counts the gradients that DDP reduces."""

    def _prepare_model(self) -> None:
        super()._prepare_model()
        if isinstance(self.model, DistributedDataParallel) and not hasattr(self, "hooked"):
            self.hooked = True
            self.model.register_comm_hook(None, allreduce_hook)  # calls the all_reduce that is counted


class Evaluations(TrainerCallback):
    """Held-out losses."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_evaluate(self, **event: Any) -> None:
        """Record the loss."""
        self.losses[event["state"].global_step] = event["metrics"]["eval_loss"]


def run(name: str, folder: Path, steps: int, micro_batch: int, seed: int) -> dict[str, Any]:
    """Train with one strategy."""
    settings = STRATEGIES[name]
    table = {
        "output_dir": str(folder / f"{name}-{seed}"), "model": MODEL,
        "data": {"path": str(folder / "shards"), "shuffle_seed": seed},
        "train": {
            "steps": steps, "tokens_per_step": dist.get_world_size() * micro_batch * SEQUENCE,
            "micro_batch": micro_batch, "device": "cpu", "clip": 1.0, "seed": seed,
        },
        "validation": {"every": steps // 10, "tokens": 65536}, "checkpoint": {"at_end": False},
        "optim": {"lr": settings["lr"], "betas": [0.9, 0.95], "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": round(settings["warmup"] * steps), "min_lr_ratio": 0.1},
        "log": {"tensorboard": False}, "parallel": settings["parallel"],
    }  # fmt: skip
    COUNTER.sent, evaluations = 0.0, Evaluations()
    progress = ProgressCallback(Console(file=io.StringIO()), plain=True)
    trainer = CountingTrainer.from_config(build_run_config(table), callbacks=[progress, evaluations])
    trainer.train()
    model = trainer.unwrapped_model()
    return {
        "settings": settings,
        "parameters": sum(p.numel() for p in model.parameters()),
        "eval_loss": evaluations.losses,
        "bytes_sent": COUNTER.sent,
        "bytes_per_step": COUNTER.sent / steps,
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--micro-batch", type=int, default=32, help="sequences per worker and step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = join_world(ParallelConfig(), "cpu")
    folder = Path(world.broadcast(tempfile.mkdtemp()))
    if world.is_main:
        documents = list(iter_documents([args.text]))
        tokenizer = train_tokenizer(documents[:200], VOCABULARY)
        prepare([args.text], folder / "shards", tokenizer, name="text", val_tokens=100_000)
    dist.barrier()
    count_collectives()
    runs = {
        seed: {name: run(name, folder, args.steps, args.micro_batch, seed) for name in STRATEGIES}
        for seed in args.seeds
    }
    if world.is_main:
        losses = [
            {name: result["eval_loss"][args.steps] for name, result in seeded.items()} for seeded in runs.values()
        ]
        ratios = [each["diloco"] / min(each["ddp"], each["ddp_high_lr"]) for each in losses]
        sent = {name: sum(seeded[name]["bytes_sent"] for seeded in runs.values()) for name in STRATEGIES}
        summary = {
            "loss_ratio": sum(ratios) / len(ratios), "loss_ratio_of_each_seed": ratios,
            "traffic_ratio": sent["ddp"] / sent["diloco"],
            "workers": world.size, "steps": args.steps, "sync_every": 50,
            "tokens_per_worker_and_step": args.micro_batch * SEQUENCE, "text": Path(args.text).name,
        }  # fmt: skip
        print(summary, flush=True)
        record("diloco", {**summary, "seeds": runs}, args.out)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
