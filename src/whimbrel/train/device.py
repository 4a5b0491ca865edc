"""Choose a device and query its name, peak FLOPS and memory; time device work."""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from whimbrel.base.errors import ConfigError
from whimbrel.distributed.world import launched_processes

__all__ = [
    "Stopwatch",
    "choose_device",
    "device_name",
    "free_memory",
    "peak_flops",
    "peak_memory",
    "reset_peak_memory",
    "total_memory",
]

CLEAR_REFS = Path("/proc/self/clear_refs")

PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("A10G", 70.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 5090", 210.0),
    ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
    ("V100", 112.0),
    ("T4", 65.0),
)
"""Dense bf16 (otherwise fp16) TFLOP/s from the datasheets; the first entry contained in the device name applies."""


def choose_device(name: str | None) -> torch.device:
    """The named device, or the best available one; raises ConfigError if it is not available.

    With several processes, each gets its own GPU.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    processes = launched_processes()
    if processes > 1:
        available["mps"] = False
    if name is None:
        name = next(kind for kind, is_available in available.items() if is_available)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"expected a device such as cuda, cuda:N, mps or cpu, got {name!r}") from error
    count = torch.cuda.device_count() if device.type == "cuda" else int(available.get(device.type, False))
    if (device.index or 0) >= count:
        usable = " or ".join(kind for kind, is_available in available.items() if is_available)
        raise ConfigError(f"device {name!r} is not available: choose {usable} (see whimbrel doctor)")
    return device if processes == 1 or device.type != "cuda" else _own_gpu(device, processes, count)


def _own_gpu(device: torch.device, processes: int, count: int) -> torch.device:
    """The GPU of this process."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if str(device) != "cuda":
        raise ConfigError(
            f"expected device cuda for {processes} processes, got {device}: each uses the GPU of its rank"
        )
    if local_rank >= count:
        raise ConfigError(
            f"expected a GPU for each process on this machine, got {count} for local rank {local_rank}: start fewer "
            "processes, or set train.device=cpu (use_cpu)"
        )
    return torch.device("cuda", local_rank)


def device_name(device: torch.device) -> str:
    """The product name of a GPU, or the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_flops(device: torch.device, count: int = 1) -> float | None:
    """Peak bf16 FLOP/s of `count` devices, or None if unknown."""
    name = device_name(device)
    return next((count * rate * 1e12 for key, rate in PEAK_TFLOPS if key in name), None)


def free_memory(device: torch.device) -> int | None:
    """Free bytes on an accelerator; None for the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return None


def total_memory(device: torch.device, processes: int = 1) -> int:
    """Bytes of memory of an accelerator; on the CPU, the share of each of `processes` in the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes so far: allocated on a GPU, resident set size on the CPU; on mps, the current allocation."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    """Reset `peak_memory` to the current usage; without effect on a CPU if the system is not Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu" and os.access(CLEAR_REFS, os.W_OK):
        CLEAR_REFS.write_text("5", encoding="ascii")  # resets the maximum of the resident set size


@dataclass(slots=True)
class Stopwatch:
    """Times device work. On CUDA, `mark` records an event without synchronizing, and `seconds` waits for it."""

    device: torch.device

    def mark(self) -> torch.cuda.Event | float:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    def seconds(self, start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        """Seconds between two marks."""
        if isinstance(start, float) or isinstance(end, float):
            return float(end) - float(start)  # type: ignore[arg-type]
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
