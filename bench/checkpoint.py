"""What a checkpoint costs: how long training stands still for it, how long it takes, what memory many of them take.

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
from whimbrel.checkpoint import CheckpointManager, RNGState, SharingPattern, StateComponent, read_manifest
from whimbrel.models import GPT, GPTConfig
from whimbrel.train.model_state import model_state

SMALL = GPTConfig(context_length=64, vocab_size=1000, num_layers=2, embd_size=64, num_heads=2)
PATIENCE = 300.0
"""Seconds after which a save that is not done is asked why."""


class Training:
    """A model, its optimizer with all of its state, and a step."""

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
        """What a trainer saves."""
        return [
            StateComponent("model", model_state(self.model), SharingPattern.GLOBAL),
            StateComponent("optimizer", self.optimizer, SharingPattern.GLOBAL),
            StateComponent("rng", RNGState(), SharingPattern.PER_RANK),
        ]

    def seconds(self, act: Callable[[], Any]) -> float:
        """How long something takes, with all work that it leaves on the device."""
        self._settle()
        begun = time.perf_counter()
        act()
        self._settle()
        return time.perf_counter() - begun

    def _settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure_stall(training: Training, folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds that a save adds to the step after it, in the background against here."""
    components = training.components()
    step = statistics.median(training.seconds(training.step) for _ in range(20))
    manager = CheckpointManager(folder / "background", keep=1, asynchronous=True)
    reserved = training.seconds(lambda: manager.reserve(components))
    stalls, calls, durable, slowdowns = [], [], [], []
    for number in range(1, rounds + 1):
        begun = time.perf_counter()

        def save_and_step(number: int = number) -> None:
            start = time.perf_counter()
            manager.save(number, components)
            calls.append(time.perf_counter() - start)
            training.step()

        stalls.append(training.seconds(save_and_step) - step)
        meanwhile = []
        while not manager.finished():
            meanwhile.append(training.seconds(training.step))
            if time.perf_counter() - begun > PATIENCE:
                manager.wait()  # raises what a save failed with
        durable.append(time.perf_counter() - begun)
        slowdowns.append(statistics.median(meanwhile or [step]) / step)
    manager.wait()
    manager.close()

    here = CheckpointManager(folder / "here", keep=1)
    here.reserve(components)
    synchronous = [training.seconds(lambda n=n: here.save(n, components)) for n in range(1, rounds + 1)]  # type: ignore[misc]
    total = sum(
        entry.size for entry in read_manifest(folder / "here" / "checkpoints" / f"step-{rounds:08d}").files.values()
    )
    here.close()
    later = statistics.median(stalls[1:])
    whole = statistics.median(synchronous)
    return {
        "parameters": training.model.num_parameters(),
        "checkpoint_bytes": total,
        "step_seconds": step,
        "synchronous_save_seconds": synchronous,
        "reserve_seconds": reserved,
        "stall_seconds": stalls,
        "call_seconds": calls,
        "seconds_until_durable": durable,
        "step_slowdown_meanwhile": slowdowns,
        "first_stall_ratio": stalls[0] / whole,
        "later_stall_ratio": later / whole,
    }


def measure_memory(training: Training, folder: Path, saves: int) -> dict[str, Any]:
    """Resident memory over many saves in the background, a step between each two."""
    components = training.components()
    manager = CheckpointManager(folder / "many", keep=2, asynchronous=True)
    resident = []
    for number in range(1, saves + 1):
        training.step()
        manager.save(number, components)
        manager.finished()
        resident.append(_resident_mb())
    manager.wait()
    manager.close()
    settled = resident[min(20, saves - 1)]
    return {
        "saves": saves,
        "resident_mb_after_20": settled,
        "resident_mb_at_end": resident[-1],
        "grown_mb": resident[-1] - settled,
    }


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096 / 2**20


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description="Measure what checkpoints cost.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--small", action="store_true", help="a model of a few layers instead of GPT-2 124M")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6, help="saves of each kind")
    parser.add_argument("--saves", type=int, help="measure memory over so many saves instead")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    training = Training(SMALL if given.small else GPTConfig(), given.device, given.batch)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        if given.saves is not None:
            results = measure_memory(training, Path(name), given.saves)
        else:
            results = measure_stall(training, Path(name), given.rounds)
    results = {"device": given.device, "small": given.small, "batch": given.batch, **results}
    for key, value in results.items():
        print(f"{key}: {value}")
    record("checkpoint", results, given.out)


if __name__ == "__main__":
    main()
