"""Memory and time of loading: the part `load` of bench/precision.py, each way in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from legs import TINY, draw, llama, now
from whimbrel.model_io import load_model, save_model
from whimbrel.models import GPT, preset
from whimbrel.precision import QuantizedWeight, quantize_

__all__ = ["measure_load"]

WEIGHTS = ("int8", "int4", "fp8")


def measure_load(args: argparse.Namespace) -> dict[str, Any]:
    """Each way of loading in a process of its own: plain, plain and then quantised, quantised tensor by tensor."""
    config = llama(**TINY) if args.tiny else preset(args.shape)
    with tempfile.TemporaryDirectory() as folder:
        save_model(draw(config, torch.device("cpu"), torch.bfloat16), folder)
        found: dict[str, Any] = {"shape": "tiny" if args.tiny else args.shape}
        for way in ("plain", "naive int8", *(f"stream {weights}" for weights in WEIGHTS)):
            command = [sys.executable, __file__, way, folder, str(args.device)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            found[way] = json.loads(done.stdout.splitlines()[-1])
            print(f"{way:12} {json.dumps(found[way])}", flush=True)
    found["peak_over_naive"] = found["stream int8"]["peak"] / found["naive int8"]["peak"]
    return found


def load_here(way: str, path: str, device: torch.device) -> dict[str, Any]:
    """Load in this process: seconds, bytes of the model, and the most that was held on the way."""
    with tempfile.TemporaryDirectory() as folder:  # what is imported when it is first needed, is here after this
        save_model(draw(llama(**TINY), torch.device("cpu"), torch.bfloat16), folder)
        load(way, folder, device)
    with Peak(device) as peak:
        start = now(device)
        model = load(way, path, device)
        seconds = now(device) - start
    stored = sum(parameter.nbytes for parameter in model.parameters())
    kinds = sum(isinstance(parameter, QuantizedWeight) for parameter in model.parameters())
    return {"seconds": seconds, "bytes": stored, "quantised": kinds, "peak": peak.bytes}


def load(way: str, path: str, device: torch.device) -> GPT:
    """plain; naive: plain, and then in a format; stream: in the format from the first."""
    how, _, weights = way.partition(" ")
    model = load_model(path, device=device, weights=weights if how == "stream" else None)
    if how == "naive":
        quantize_(model, weights)
    return model


class Peak:
    """The most memory that was taken inside: of the GPU's allocator, or of this process but for files that it reads."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes, self._over = device, 0, threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            self._before = anonymous()
            self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated()
        else:
            self._over.set()
            self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.bytes = max(self.bytes, anonymous() - self._before)


def anonymous() -> int:
    """Bytes of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


if __name__ == "__main__":
    print(json.dumps(load_here(sys.argv[1], sys.argv[2], torch.device(sys.argv[3]))))
