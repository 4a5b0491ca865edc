"""Memory of a training step, predicted and measured: every optimizer on models of a few sizes, each in its own process.

    python bench/memory.py --device cpu --out bench/results/memory-cpu.json
    python bench/memory.py --device cuda --out bench/results/memory-cuda.json
    python bench/memory.py --device cuda --targets --out bench/results/memory-targets.json

Measured on a GPU is the most that the allocator gave out and, beside it, the most that it took from the driver, with
segments that grow (expandable_segments), so that little of it lies in pieces; the CUDA context is not in it. On a CPU
it is by how much the resident memory of a process grew at most, with malloc told to hand back what is freed: what it
hoards says more of malloc than of the step. Steps are those of training: same parts, same loop, any tokens.

The targets are runs under a hard cap of the GPU's memory: accumulation, clipping, recomputation, nothing offloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from record import record
from whimbrel.config import to_table
from whimbrel.distributed import apply_activation_checkpointing
from whimbrel.models import GPT
from whimbrel.precision import QuantizedWeight
from whimbrel.train import RunConfig
from whimbrel.train.build import create_optimizer, init_model
from whimbrel.train.config import build_run_config
from whimbrel.train.memory import dry_run, empty_model, optimizer_names, predict_memory, with_optimizer

GIB = 2**30
STEPS = 2
"""Steps per measurement: the first allocates optimizer state and computes the bases; the second starts with both."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""glibc malloc: allocations of 64 KiB or more use mmap and are returned to the OS when freed."""
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def run(model: dict[str, Any], optim: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    """Config of a run that is only stepped; nothing is read from or written to its paths."""
    return build_run_config(
        {
            "output_dir": "unused", "data": {"path": "unused"}, "model": model, "optim": optim or {},
            "train": {"steps": 1000, "accumulation": 2, "clip": 1.0, **train},
        }
    )  # fmt: skip


def llama(layers: int, width: int, heads: int, mlp: int, length: int) -> dict[str, Any]:
    """`[model]` table of a Llama-shaped model with a vocabulary of 32,000."""
    return {
        "preset": "llama2-7b", "num_layers": layers, "embd_size": width, "num_heads": heads, "mlp_size": mlp,
        "context_length": length,
    }  # fmt: skip


SIZES: dict[str, dict[str, RunConfig]] = {
    "cpu": {
        "gpt2, 42M, fp32": run(
            {"preset": "gpt2", "num_layers": 8, "embd_size": 512, "num_heads": 8, "vocab_size": 32_000},
            micro_batch=1,
        ),
        "llama, 58M, fp32, recompute": run(llama(8, 512, 8, 1376, 512), micro_batch=2, recompute="full"),
    },
    "cuda": {
        "gpt2, 124M, bf16": run({"preset": "gpt2"}, micro_batch=16, precision="bf16"),
        "llama, 1.3B, bf16 weights, recompute": run(
            llama(24, 2048, 32, 5461, 2048), micro_batch=4, default_dtype="bfloat16", recompute="full"
        ),
    },
}


@dataclass(frozen=True, slots=True)
class Target:
    """A run that must fit under a cap on GPU memory."""

    cap: int
    config: RunConfig
    steps: int = 56
    """More than one gap (50), so that all initial bases have been computed."""


def target(cap: float, model: dict[str, Any], rank: int, side: str = "right", weights: str | None = None) -> Target:
    """Moments and bases in 8 bits, or bases in 4 beside weights in 8; gradients projected in backward."""
    bases = "int8" if weights is None else "int4"
    optim = {"name": "galore_warm", "rank": rank, "gap": 50, "store": "int8", "basis_store": bases, "side": side}
    settings = {"default_dtype": "bfloat16", "recompute": "full", "optimizer_in_backward": True, "weights": weights}
    return Target(int(cap * GIB), run(model, optim, micro_batch=1, **settings))


SEVEN, THIRTEEN = llama(32, 4096, 32, 11008, 2048), llama(40, 5120, 40, 13824, 2048)
TARGETS = {
    "7B, bf16 weights, rank 1024": target(21.5, SEVEN, 1024),
    "7B, int8 weights, rank 1024": target(15.0, SEVEN, 1024, weights="int8"),
    "7B, int8 weights, rank 512, cheapest side": target(11.3, SEVEN, 512, "cheapest", "int8"),
    "13B, int8 weights, rank 640, cheapest side": target(22.5, THIRTEEN, 640, "cheapest", "int8"),
    "1B, bf16 weights, rank 512": target(5.2, llama(24, 2048, 32, 5461, 2048), 512),
}


def measure(config: RunConfig, device: torch.device, steps: int, cap: int | None) -> dict[str, int]:
    """Peak memory of a few steps, in bytes."""
    if cap is not None:
        torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(device).total_memory)
    small = llama(1, 64, 2, 64, 64)
    make_steps(run(small, micro_batch=1, precision=config.train.precision), device, 1)  # what torch loads, is loaded
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        make_steps(config, device, steps)
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset VmHWM
    before = resident("VmRSS")
    make_steps(config, device, steps)
    return {"resident": resident("VmHWM") - before}


def make_steps(config: RunConfig, device: torch.device, steps: int) -> None:
    """Build the model and run `steps` training steps on random tokens; quantized weights get random codes."""
    with device:
        model = init_model(config) if config.train.weights is None else drawn_codes(config, device)
    apply_activation_checkpointing(model, config.train.recompute)
    optimizer = create_optimizer(model, config, None, accumulation=config.train.accumulation or 1)
    loop = dry_run(config, model, device, optimizer)
    for number in range(steps):
        loop.run(number + 1)
        loop.flush_metrics(lambda *_: None)


@torch.no_grad()
def drawn_codes(config: RunConfig, device: torch.device) -> GPT:
    """A model with random quantized weights, created without dense weights, which might exceed the cap."""
    model = empty_model(config, device)
    for parameter in model.parameters():
        if isinstance(parameter, QuantizedWeight):
            parameter.codes.random_(-64, 64)
            parameter.scales.fill_(5e-4)
        elif parameter.dim() == 1:  # norm weights
            parameter.fill_(1)
        else:
            parameter.normal_(std=0.02)
    return model


def resident(name: str) -> int:
    """Resident memory of this process in bytes: current (VmRSS) or peak (VmHWM)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def measure_apart(config: RunConfig, device: str, steps: int = STEPS, cap: int | None = None) -> dict[str, Any]:
    """`measure` in a subprocess; on failure, returns the last line of its stderr as `failed`."""
    asked = json.dumps({"config": to_table(config), "steps": steps, "cap": cap})
    done = subprocess.run(
        [sys.executable, __file__, "--device", device, "--measure", asked],
        env=os.environ | (MALLOC if device == "cpu" else SEGMENTS), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def jobs(arguments: argparse.Namespace) -> Iterator[tuple[str, RunConfig, int, int | None]]:
    """Yields (name, config, number of steps, memory cap) for each measurement."""
    if arguments.targets:
        for name, aim in TARGETS.items():
            yield name, aim.config, aim.steps, aim.cap
        return
    for size, config in SIZES[arguments.device].items():
        for name in arguments.optimizer or optimizer_names():
            yield size, with_optimizer(config, name), STEPS, None


def main() -> None:
    """Run all measurements and print them next to the predictions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--optimizer", choices=optimizer_names(), action="append")
    parser.add_argument("--targets", action="store_true", help="the runs under a cap, in place of the sizes")
    parser.add_argument("--jobs", type=int, help="processes at a time; 4 on a GPU, 1 on a CPU and for targets")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = arguments.device
    if arguments.measure:
        asked = json.loads(arguments.measure)
        print(
            json.dumps(measure(build_run_config(asked["config"]), torch.device(device), asked["steps"], asked["cap"]))
        )
        return
    at_once = arguments.jobs or (4 if device == "cuda" and not arguments.targets else 1)
    results = []
    with ThreadPoolExecutor(at_once) as pool:
        started = [
            (size, config, cap, pool.submit(measure_apart, config, device, steps, cap))
            for size, config, steps, cap in jobs(arguments)
        ]
        for size, config, cap, job in started:
            (predicted,) = predict_memory(config, device)
            measured = job.result()
            figures = {name: value for name, value in asdict(predicted).items() if name != "parameters"}
            results.append({"size": size, "cap": cap, "predicted": figures, "measured": measured})
            print(line(size, config.optim.name, predicted.peak, measured, cap), flush=True)
    record("memory", {"device": device, "threads": torch.get_num_threads(), "runs": results}, arguments.out)


def line(size: str, optimizer: str, predicted: int, measured: dict[str, Any], cap: int | None) -> str:
    """Format one result as a line."""
    head = f"{size:37} {optimizer:12} predicted {predicted / GIB:6.3f} GiB"
    if "failed" in measured:
        return f"{head}, failed: {measured['failed']}"
    figures = ", ".join(f"{name} {value / GIB:6.3f}" for name, value in measured.items())
    first = next(iter(measured.values()))
    under = "" if cap is None else f", cap {cap / GIB:.1f}"
    return f"{head}, {figures}, predicted/measured {predicted / first:.3f}{under}"


if __name__ == "__main__":
    main()
