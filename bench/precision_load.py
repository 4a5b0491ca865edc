"""Memory and time of loading: `bench/precision.py load`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from typing import Any

import torch

from timing import TINY, init_model, llama, now, process_memory
from whimbrel.model_io import load_model, save_model
from whimbrel.models import GPT, preset
from whimbrel.precision import QuantizedWeight, quantize_

__all__ = ["measure_load"]

WEIGHTS = ("int8", "int4", "fp8")


def measure_load(args: argparse.Namespace) -> dict[str, Any]:
    """Load unquantized, quantize after loading and quantize while loading, each in a separate process."""
    config = llama(**TINY) if args.tiny else preset(args.shape)
    with tempfile.TemporaryDirectory() as folder:
        save_model(init_model(config, torch.device("cpu"), torch.bfloat16), folder)
        results: dict[str, Any] = {"shape": "tiny" if args.tiny else args.shape}
        for variant in ("unquantized", "naive int8", *(f"stream {weights}" for weights in WEIGHTS)):
            command = [sys.executable, __file__, variant, folder, str(args.device)]
            completed = subprocess.run(command, capture_output=True, text=True, check=False)
            if completed.returncode:
                raise SystemExit(completed.stderr)
            results[variant] = json.loads(completed.stdout.splitlines()[-1])
            print(f"{variant:12} {json.dumps(results[variant])}", flush=True)
    results["peak_over_naive"] = results["stream int8"]["peak"] / results["naive int8"]["peak"]
    return results


def load_here(variant: str, path: str, device: torch.device) -> dict[str, Any]:
    """Load in this process. Returns the time, the size of the model and the peak memory."""
    with tempfile.TemporaryDirectory() as folder:  # warmup: lazy imports
        save_model(init_model(llama(**TINY), torch.device("cpu"), torch.bfloat16), folder)
        load(variant, folder, device)
    with PeakMemory(device) as peak:
        start = now(device)
        model = load(variant, path, device)
        seconds = now(device) - start
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    num_quantized = sum(isinstance(parameter, QuantizedWeight) for parameter in model.parameters())
    return {"seconds": seconds, "bytes": num_bytes, "quantized": num_quantized, "peak": peak.bytes}


def load(variant: str, path: str, device: torch.device) -> GPT:
    """naive: quantize after loading; stream: quantize while loading."""
    method, _, weights = variant.partition(" ")
    model = load_model(path, device=device, quantize=weights if method == "stream" else None)
    if method == "naive":
        quantize_(model, weights)
    return model


class PeakMemory:
    """Measures peak memory: of the CUDA allocator, or the anonymous memory of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes, self._stop = device, 0, threading.Event()
        self._sampler = threading.Thread(target=self._sample)

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            self._before = process_memory("RssAnon")
            self._sampler.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated()
        else:
            self._stop.set()
            self._sampler.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.bytes = max(self.bytes, int(process_memory("RssAnon") - self._before))


if __name__ == "__main__":
    print(json.dumps(load_here(sys.argv[1], sys.argv[2], torch.device(sys.argv[3]))))
