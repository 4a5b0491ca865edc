"""Predicted and measured peak memory of a training step, for every optimizer and several model sizes.

    python bench/memory.py --device cpu --out bench/results/memory-cpu.json
    python bench/memory.py --device cuda --out bench/results/memory-cuda.json
    python bench/memory.py --device cuda --targets --out bench/results/memory-targets.json

Each measurement runs in a separate process. On a GPU it is the peak memory allocated and reserved by PyTorch's caching
allocator, with expandable segments to limit fragmentation; the CUDA context is not included. On a CPU it is the peak
growth of resident memory, with malloc configured to return freed memory to the OS, so that its caching does not distort
the result. Steps use the components and the loop of real training, on random tokens.

`--targets` trains models under a hard cap on GPU memory, with gradient accumulation, clipping and full activation
checkpointing, without offloading, and compares tokens/s with AdamW on bf16 weights without a cap or checkpointing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from record import record
from timing import process_memory
from whimbrel.config import to_table
from whimbrel.distributed import apply_activation_checkpointing
from whimbrel.models import GPT
from whimbrel.precision import QuantizedWeight
from whimbrel.train import RunConfig
from whimbrel.train.build import create_optimizer
from whimbrel.train.initial_model import init_model
from whimbrel.train.memory import build_dry_run_step, empty_model, optimizer_names, predict_memory, with_optimizer
from whimbrel.train.run_config import build_run_config

GIB = 2**30
STEPS = 2
"""Steps per measurement: the first allocates optimizer state and computes the bases; the second starts with both."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""glibc malloc: allocations of 64 KiB or more use mmap and are returned to the OS when freed."""
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
MEMORY = ("allocated", "reserved", "resident")
"""The measured amounts of memory."""


def make_config(model: dict[str, Any], optim: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    """Config of a run; its paths are neither read nor written."""
    return build_run_config(
        {
            "output_dir": "unused", "data": {"path": "unused"}, "model": model, "optim": optim or {},
            "train": {"steps": 1000, "accumulation": 2, "clip": 1.0, **train},
        }
    )  # fmt: skip


def llama_table(layers: int, width: int, heads: int, mlp: int, length: int) -> dict[str, Any]:
    """`[model]` table of a Llama-shaped model with a vocabulary of 32,000."""
    return {
        "preset": "llama2-7b", "num_layers": layers, "embd_size": width, "num_heads": heads, "mlp_size": mlp,
        "context_length": length,
    }  # fmt: skip


SIZES: dict[str, dict[str, RunConfig]] = {
    "cpu": {
        "gpt2, 42M, fp32": make_config(
            {"preset": "gpt2", "num_layers": 8, "embd_size": 512, "num_heads": 8, "vocab_size": 32_000},
            micro_batch=1,
        ),
        "llama, 58M, fp32, recompute": make_config(llama_table(8, 512, 8, 1376, 512), micro_batch=2, recompute="full"),
    },
    "cuda": {
        "gpt2, 124M, bf16": make_config({"preset": "gpt2"}, micro_batch=16, precision="bf16"),
        "llama, 1.3B, bf16 weights, recompute": make_config(
            llama_table(24, 2048, 32, 5461, 2048), micro_batch=4, default_dtype="bfloat16", recompute="full"
        ),
    },
}


@dataclass(frozen=True, slots=True)
class Target:
    """A run that must fit under a cap on GPU memory, if any."""

    cap: int | None
    config: RunConfig
    steps: int = 56
    """More than one gap (50), so that all initial bases have been computed."""


def make_target(
    cap: float, model: dict[str, Any], rank: int, side: str = "right", weights: str | None = None
) -> Target:
    """`galore_warm` with int8 moments and bases (int4 with quantized weights); gradients are projected in backward."""
    bases = "int8" if weights is None else "int4"
    optim = {"name": "galore_warm", "rank": rank, "gap": 50, "store": "int8", "basis_store": bases, "side": side}
    settings = {
        "default_dtype": "bfloat16",
        "recompute": "full",
        "optimizer_in_backward": True,
        "weight_dtype": weights,
    }
    return Target(int(cap * GIB), make_config(model, optim, micro_batch=1, **settings))


def uncapped_adamw(model: dict[str, Any]) -> Target:
    """AdamW with weights, gradients and states in bf16, and all activations kept."""
    config = make_config(model, {"name": "adamw"}, micro_batch=1, default_dtype="bfloat16")
    return Target(None, config, steps=12)


LLAMA_1B, LLAMA_7B = llama_table(24, 2048, 32, 5461, 2048), llama_table(32, 4096, 32, 11008, 2048)
LLAMA_13B = llama_table(40, 5120, 40, 13824, 2048)
TARGETS = {
    "7B, bf16 weights, rank 1024": make_target(21.5, LLAMA_7B, 1024),
    "7B, int8 weights, rank 1024": make_target(15.0, LLAMA_7B, 1024, weights="int8"),
    "7B, int8 weights, rank 512, cheapest side": make_target(11.3, LLAMA_7B, 512, "cheapest", "int8"),
    "13B, int8 weights, rank 640, cheapest side": make_target(22.5, LLAMA_13B, 640, "cheapest", "int8"),
    "1B, bf16 weights, rank 512": make_target(5.2, LLAMA_1B, 512),
    "7B, AdamW in bf16": uncapped_adamw(LLAMA_7B),
    "1B, AdamW in bf16": uncapped_adamw(LLAMA_1B),
}


def measure(config: RunConfig, device: torch.device, steps: int, cap: int | None) -> dict[str, float]:
    """Peak memory of a few steps, in bytes, and on a GPU the tokens per second of the second half of them."""
    if cap is not None:
        torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(device).total_memory)
    small = llama_table(1, 64, 2, 64, 64)
    run_steps(make_config(small, micro_batch=1, precision=config.train.precision), device, 1)  # loads torch libraries
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds = run_steps(config, device, steps)
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "tokens_per_second": config.tokens_per_step / statistics.mean(seconds[steps // 2 :]),
        }
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset VmHWM
    before = process_memory("VmRSS")
    run_steps(config, device, steps)
    return {"resident": int(process_memory("VmHWM") - before)}


def run_steps(config: RunConfig, device: torch.device, steps: int) -> list[float]:
    """Run `steps` training steps on random tokens, with random codes in quantized weights; the seconds of each step."""
    with device:
        model = init_model(config) if config.train.weight_dtype is None else random_quantized_model(config, device)
    apply_activation_checkpointing(model, config.train.recompute)
    optimizer = create_optimizer(model, config, None, accumulation=config.train.accumulation or 1)
    loop = build_dry_run_step(config, model, device, optimizer)
    times = [time.perf_counter()]
    for number in range(steps):
        loop.run(number + 1)
        loop.flush_metrics(lambda *_: None)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(times)]


@torch.no_grad()
def random_quantized_model(config: RunConfig, device: torch.device) -> GPT:
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


def measure_in_subprocess(config: RunConfig, device: str, steps: int = STEPS, cap: int | None = None) -> dict[str, Any]:
    """`measure` in a subprocess. If it fails, `failed` is the last line of its stderr."""
    request = json.dumps({"config": to_table(config), "steps": steps, "cap": cap})
    completed = subprocess.run(
        [sys.executable, __file__, "--device", device, "--measure", request],
        env=os.environ | (MALLOC if device == "cpu" else SEGMENTS), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if completed.returncode:
        return {"failed": completed.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return result


def measurements(args: argparse.Namespace) -> Iterator[tuple[str, RunConfig, int, int | None]]:
    """Yields (name, config, number of steps, memory cap) for each measurement."""
    if args.targets:
        for name, target in TARGETS.items():
            yield name, target.config, target.steps, target.cap
        return
    for size, config in SIZES[args.device].items():
        for name in args.optimizer or optimizer_names():
            yield size, with_optimizer(config, name), STEPS, None


def main() -> None:
    """Run all measurements and print each next to its prediction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--optimizer", choices=optimizer_names(), action="append")
    parser.add_argument("--targets", action="store_true", help="train under a memory cap instead")
    parser.add_argument(
        "--jobs", type=int, help="concurrent processes (default: 4 on a GPU, 1 on a CPU and with --targets)"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = args.device
    if args.measure:
        request = json.loads(args.measure)
        print(
            json.dumps(
                measure(build_run_config(request["config"]), torch.device(device), request["steps"], request["cap"])
            )
        )
        return
    max_workers = args.jobs or (4 if device == "cuda" and not args.targets else 1)
    results = []
    with ThreadPoolExecutor(max_workers) as pool:
        futures = [
            (size, config, cap, pool.submit(measure_in_subprocess, config, device, steps, cap))
            for size, config, steps, cap in measurements(args)
        ]
        for size, config, cap, future in futures:
            (predicted,) = predict_memory(config, device)
            measured = future.result()
            figures = {name: value for name, value in asdict(predicted).items() if name != "parameters"}
            results.append({"size": size, "cap": cap, "predicted": figures, "measured": measured})
            print(format_result(size, config.optim.name, predicted.peak, measured, cap), flush=True)
    record("memory", {"device": device, "threads": torch.get_num_threads(), "runs": results}, args.out)


def format_result(size: str, optimizer: str, predicted: int, measured: dict[str, Any], cap: int | None) -> str:
    head = f"{size:43} {optimizer:12} predicted {predicted / GIB:6.3f} GiB"
    if "failed" in measured:
        return f"{head}, failed: {measured['failed']}"
    figures = ", ".join(f"{name} {measured[name] / GIB:6.3f}" for name in MEMORY if name in measured)
    first = next(iter(measured.values()))
    under = "" if cap is None else f", cap {cap / GIB:.1f}"
    speed = f", {measured['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in measured else ""
    return f"{head}, {figures}, predicted/measured {predicted / first:.3f}{under}{speed}"


if __name__ == "__main__":
    main()
