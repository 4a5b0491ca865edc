"""Bandwidth of the matrix-vector products of a decode step, for several tiles, compared with cuBLAS.

    python bench/decode_kernels.py --model llama2-7b --out kernels.json

Each product reads as many copies of its weight as exceed the L2 cache, one after the other, in a CUDA graph.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decode import READ_BANDWIDTH
from record import record
from whimbrel.ops.decode_triton import LinearWeight, Norm, Tile, linear
from whimbrel.precision import QuantizedWeight

SHAPES = {
    "llama2-7b": {"qkv": (12288, 4096), "out": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)},
    "llama3.2-1b": {"qkv": (3072, 2048), "out": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
    "gpt2": {"qkv": (2304, 768), "out": (768, 768), "up": (3072, 768), "down": (768, 3072), "head": (50257, 768)},
}
"""Rows and columns of the weights of a layer."""
CACHE_BYTES = 400e6
DTYPE = torch.bfloat16


def time_graph(run: Callable[[int], object], copies: int) -> float:
    """Seconds of a run: the median of replays of a CUDA graph that runs once per copy."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            run(copy)
    times: list[float] = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) / 1000 / copies)
    return statistics.median(times[2:])


def encode(weight: Tensor, name: str) -> LinearWeight:
    """A weight in a format."""
    if name == "bf16":
        return LinearWeight(weight)
    quantized = QuantizedWeight.quantize(weight, name)
    kind = quantized.format
    return LinearWeight(quantized.codes, quantized.scales, kind.codes, kind.group_size or 0, kind.activations == "fp8")


def tiles(itemsize: int, gated: bool) -> list[Tile]:
    """Candidates: 16 bytes per thread and row."""
    rows = (1, 2, 4, 8) if gated else (1, 2, 4, 8, 16)
    return [Tile(each, warps * 32 * 16 // itemsize, warps) for warps in (2, 4, 8) for each in rows]


def measure(name: str, shape: tuple[int, int], weight_format: str) -> dict[str, Any]:
    """Microseconds and share of the bandwidth limit for every tile."""
    rows, columns = shape
    gated = name == "gate_up"
    generator = torch.Generator("cuda").manual_seed(0)
    first = encode(torch.randn(rows, columns, generator=generator, device="cuda", dtype=DTYPE), weight_format)
    nbytes = first.values.nbytes + (0 if first.scales is None else first.scales.nbytes)
    copies = max(4, min(200, int(CACHE_BYTES / nbytes)))
    weights = [first] + [
        LinearWeight(first.values.clone(), first.scales, first.format, first.group_size, first.quantizes_input)
        for _ in range(copies - 1)
    ]
    x = torch.randn(columns, generator=generator, device="cuda", dtype=DTYPE)
    y = torch.zeros(rows // 2 if gated else rows, device="cuda", dtype=DTYPE)
    takes_norm = name not in ("out", "down")
    norm = Norm("rms", 1e-5, torch.ones_like(x), None) if takes_norm else None
    settings: dict[str, Any] = {"norm": norm, "gated": gated, "activation": "silu" if gated else "none"}
    if not takes_norm:
        settings["residual"] = y
    limit = nbytes / READ_BANDWIDTH[torch.cuda.get_device_name()]
    results: dict[str, Any] = {"bytes": nbytes, "limit_us": limit * 1e6}
    if weight_format == "bf16":
        seconds = time_graph(lambda copy: F.linear(x, weights[copy].values), copies)
        results["cublas"] = {"us": seconds * 1e6, "share": limit / seconds}

    def run(tile: Tile, copy: int) -> None:
        linear(x, weights[copy], y, tile=tile, **settings)

    for tile in tiles(first.values.element_size(), gated):
        if tile.block * (2 if weight_format == "int4" else 1) >= 2 * columns:
            continue
        seconds = time_graph(partial(run, tile), copies)
        results[f"{tile.rows}x{tile.block} warps {tile.warps}"] = {"us": seconds * 1e6, "share": limit / seconds}
    best = min((key for key in results if "warps" in key), key=lambda key: results[key]["us"])
    cublas = f", cuBLAS {results['cublas']['share']:.2f}" if "cublas" in results else ""
    print(
        f"{name:8} {weight_format:5} {results[best]['us']:7.1f} us, {results[best]['share']:.2f}, {best}{cublas}",
        flush=True,
    )
    return results


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="llama2-7b")
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "fp8", "int4"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"model": args.model}
    for name, shape in SHAPES[args.model].items():
        for weight_format in args.formats:
            results[f"{name} {weight_format}"] = measure(name, shape, weight_format)
            record("decode_kernels", results, args.out)


if __name__ == "__main__":
    main()
