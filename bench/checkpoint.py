"""Cost of checkpoints: how long training stalls, how long a save takes, memory over many saves.

python bench/checkpoint.py --device cuda --out bench/results/checkpoint.json
python bench/checkpoint.py --device cpu --small --saves 500 --out bench/results/checkpoint-memory.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from record import record
from timing import process_memory
from whimbrel.checkpoint import CheckpointManager, RNGState, SharingPattern, StateComponent, read_manifest
from whimbrel.models import GPT, GPTConfig
from whimbrel.train.checkpointing import model_state

SMALL = GPTConfig(context_length=64, vocab_size=1000, num_layers=2, embd_size=64, num_heads=2)
SAVE_TIMEOUT = 300.0
"""Seconds after which a background save counts as failed."""


class Training:
    """A model, its optimizer with initialized state, and a training step."""

    def __init__(self, config: GPTConfig, device: str, batch: int) -> None:
        self.device = device
        self.model = GPT(config).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device == "cuda")
        self.tokens = torch.randint(0, config.vocab_size, (batch, config.context_length), device=device)
        self.step()

    def step(self) -> None:
        """One optimizer step, queued on the device."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.model(self.tokens, targets=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def components(self) -> list[StateComponent]:
        """The components of a trainer's checkpoint."""
        return [
            StateComponent("model", model_state(self.model), SharingPattern.GLOBAL),
            StateComponent("optimizer", self.optimizer, SharingPattern.GLOBAL),
            StateComponent("rng", RNGState(), SharingPattern.PER_RANK),
        ]

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of a call, including the work it queues on the device."""
        self._synchronize()
        start_time = time.perf_counter()
        call()
        self._synchronize()
        return time.perf_counter() - start_time

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure_stall(training: Training, folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds that a save adds to the next step, asynchronous and synchronous."""
    components = training.components()
    step = statistics.median(training.seconds(training.step) for _ in range(20))
    manager = CheckpointManager(folder / "asynchronous", keep=1, asynchronous=True)
    reserve_seconds = training.seconds(lambda: manager.reserve(components))
    stalls, calls, durable, slowdowns = [], [], [], []
    for number in range(1, rounds + 1):
        start_time = time.perf_counter()

        def save_and_step(number: int = number) -> None:
            start = time.perf_counter()
            manager.save(number, components)
            calls.append(time.perf_counter() - start)
            training.step()

        stalls.append(training.seconds(save_and_step) - step)
        concurrent = []
        while not manager.finished():
            concurrent.append(training.seconds(training.step))
            if time.perf_counter() - start_time > SAVE_TIMEOUT:
                manager.wait()  # raises the error of a failed save
        durable.append(time.perf_counter() - start_time)
        slowdowns.append(statistics.median(concurrent or [step]) / step)
    manager.wait()
    manager.close()

    blocking = CheckpointManager(folder / "synchronous", keep=1)
    blocking.reserve(components)
    synchronous = [training.seconds(lambda n=n: blocking.save(n, components)) for n in range(1, rounds + 1)]  # type: ignore[misc]
    total = sum(
        entry.size
        for entry in read_manifest(folder / "synchronous" / "checkpoints" / f"step-{rounds:08d}").files.values()
    )
    blocking.close()
    later = statistics.median(stalls[1:])
    full_save = statistics.median(synchronous)
    return {
        "parameters": training.model.num_parameters(),
        "checkpoint_bytes": total,
        "step_seconds": step,
        "synchronous_save_seconds": synchronous,
        "reserve_seconds": reserve_seconds,
        "stall_seconds": stalls,
        "call_seconds": calls,
        "seconds_until_durable": durable,
        "step_slowdown_during_save": slowdowns,
        "first_stall_ratio": stalls[0] / full_save,
        "later_stall_ratio": later / full_save,
    }


def measure_memory(training: Training, folder: Path, saves: int) -> dict[str, Any]:
    """Resident memory over many asynchronous saves with a step between them."""
    components = training.components()
    manager = CheckpointManager(folder / "many", keep=2, asynchronous=True)
    resident = []
    for number in range(1, saves + 1):
        training.step()
        manager.save(number, components)
        manager.finished()
        resident.append(process_memory("VmRSS") / 2**20)
    manager.wait()
    manager.close()
    baseline = resident[min(20, saves - 1)]
    return {
        "saves": saves,
        "resident_mb_after_20": baseline,
        "resident_mb_at_end": resident[-1],
        "growth_mb": resident[-1] - baseline,
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description="Measure the cost of checkpoints.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--small", action="store_true", help="two layers instead of GPT-2 124M")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6, help="saves of each kind")
    parser.add_argument("--saves", type=int, help="measure memory over this many saves instead")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary directory of the system)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    training = Training(SMALL if args.small else GPTConfig(), args.device, args.batch)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        if args.saves is not None:
            results = measure_memory(training, Path(name), args.saves)
        else:
            results = measure_stall(training, Path(name), args.rounds)
    results = {"device": args.device, "small": args.small, "batch": args.batch, **results}
    for key, value in results.items():
        print(f"{key}: {value}")
    record("checkpoint", results, args.out)


if __name__ == "__main__":
    main()
