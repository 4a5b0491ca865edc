"""Cost of DDP and FSDP2 over the plain trainer with one process: same compiled model, data and optimizer.

    python bench/distributed.py --data data/webmix20M --out bench/results/distributed-cuda.json

With one process no bytes travel, so the ratios are what the wrappers cost: hooks, buckets, streams and copies. Complete
runs alternate in one process; the first round is warmup.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from record import record
from timing import now
from whimbrel.train import TrainerCallback, load_run_config, train
from whimbrel.train.callbacks import ProgressCallback

RECIPE = "gpt2-baseline-20m"
STRATEGIES: dict[str, list[str]] = {
    "trainer": [],
    "ddp": ["--parallel.strategy=ddp"],
    "fsdp": ["--parallel.strategy=fsdp"],
}
WARMUP_STEPS = 5


class StepTimer(TrainerCallback):
    """The mean time of the steps after the warmup, including queued device work."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.start, self.seconds = device, 0.0, 0.0

    def on_step_begin(self, **event: Any) -> None:
        """Start the clock after the warmup."""
        if event["state"].global_step == WARMUP_STEPS:
            self.start = now(self.device)

    def on_train_end(self, **event: Any) -> None:
        """Stop the clock."""
        self.seconds = (now(self.device) - self.start) / (event["state"].global_step - WARMUP_STEPS)


def run(overrides: list[str], device: torch.device) -> float:
    """Seconds per step of one training run."""
    timer = StepTimer(device)
    with tempfile.TemporaryDirectory() as folder:
        config = load_run_config(RECIPE, [*overrides, f"--output_dir={folder}/run"])
        train(config, callbacks=[ProgressCallback(Console(file=io.StringIO()), plain=True), timer])
    return timer.seconds


def main() -> None:
    """Alternate the strategies and print their step times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="directory of training shards")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--override", action="append", default=[], help="a setting of the run, such as --train.compile=false"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = [
        f"--data.path={args.data}", f"--train.device={args.device}", f"--train.steps={args.steps}",
        "--train.tokens_per_step=32768", "--train.compile_scope=block", "--checkpoint.every=none",
        "--checkpoint.at_end=false", *args.override,
    ]  # fmt: skip
    rounds = [
        {name: run([*settings, *overrides], torch.device(args.device)) for name, overrides in STRATEGIES.items()}
        for _ in range(args.rounds + 1)
    ][1:]
    results: dict[str, Any] = {"rounds": rounds, "settings": settings}
    for name in STRATEGIES:
        seconds = statistics.median(times[name] for times in rounds)
        ratio = statistics.median(times[name] / times["trainer"] for times in rounds)
        results[name] = {"milliseconds": seconds * 1e3, "ratio": ratio}
        print(f"{name:8} {seconds * 1e3:8.2f} ms per step, {ratio:.4f} x trainer")
    record("distributed", results, args.out)


if __name__ == "__main__":
    main()
