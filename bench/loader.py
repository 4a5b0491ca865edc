"""Throughput of `TokenDataLoader`, and the memory that a shard of 100M tokens adds.

python bench/loader.py --out bench/results/loader.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from record import record
from timing import process_memory
from whimbrel.data import TokenDataLoader, write_shard

TOKENS = 100_000_000
ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"seed": 1},
    "packed": {"documents": "pack"},
    "packed and shuffled": {"documents": "pack", "seed": 1},
}


def measure(folder: Path, B: int, T: int, device: str, rounds: int, options: dict[str, Any]) -> dict[str, float]:
    """Median rate over `rounds` of 200 batches on one thread, and the memory that opening and reading add."""
    before, start = process_memory("RssAnon"), time.perf_counter()
    loader = TokenDataLoader(folder, B, T, device=device, **options)
    opened = time.perf_counter() - start
    loader.next_batch()
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(200):
            loader.next_batch()
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(200 * B * T / (time.perf_counter() - start))
    added = (process_memory("RssAnon") - before) / 2**20
    return {"tokens_per_second": statistics.median(rates), "open_seconds": opened, "memory_added_mb": added}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description="Measure TokenDataLoader on one core.")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"device": args.device, "batch": [args.batch, args.length], "shard_tokens": TOKENS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = np.random.default_rng(0).integers(0, 50256, TOKENS, dtype=np.uint16)
        tokens[::800] = 50256
        write_shard(folder / "bench_train_000000.bin", tokens)
        del tokens
        measure(folder, args.batch, args.length, args.device, 1, {})  # warmup: the first use of torch allocates memory
        for order, options in ORDERS.items():
            result = measure(folder, args.batch, args.length, args.device, args.rounds, options)
            results[order] = result
            print(
                f"{order}: {result['tokens_per_second'] / 1e6:.0f}M tokens/s, {result['memory_added_mb']:.1f} MB added"
            )
    record("loader", results, args.out)


if __name__ == "__main__":
    main()
