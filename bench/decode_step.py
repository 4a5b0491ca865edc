"""Time of a decode step in the CUDA kernel, and the share of the GPU's read bandwidth that it reaches.

    python bench/decode_step.py --model llama2-7b --layers 8 --weights int8 --batch 1 --context 128
    python bench/decode_step.py --layers 4 --context 32768 --kv-cache none int8 fp8 int4

Weights are random. A step reads the weights, without the token embedding unless it is tied, and the KV cache. Steps run
in a CUDA graph; `counts` is 0, so that all of them see the same context.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from decode import READ_BANDWIDTH
from record import record
from timing import init_model
from whimbrel.cache.buffer import KV_CODECS
from whimbrel.inference.cuda_decoder import BATCH_SIZES, CudaDecoder
from whimbrel.inference.paged_cache import BlockPool
from whimbrel.models import GPT, preset
from whimbrel.precision import QuantizedWeight, quantize_

BLOCK_SIZE, STEPS, ROUNDS = 16, 8, 9
DTYPE = torch.bfloat16


def step_bytes(model: GPT, batch: int, context: int, codec: str) -> int:
    """Bytes that a step reads."""
    weights = {id(p): p for p in model.parameters()}
    if model.lm_head.weight is not model.token_embedding.weight:
        del weights[id(model.token_embedding.weight)]
    sizes = (p.codes.nbytes + p.scales.nbytes if isinstance(p, QuantizedWeight) else p.nbytes for p in weights.values())
    return sum(sizes) + batch * context * BlockPool.block_nbytes(model.config, 1, dtype=DTYPE, codec=codec)


@torch.inference_mode()
def step_seconds(model: GPT, batch: int, context: int, codec: str) -> float:
    """Seconds of a step, the median of several replays."""
    device = torch.device("cuda")
    blocks = -(-(context + 1) // BLOCK_SIZE)
    pool = BlockPool(model.config, blocks * batch + 1, BLOCK_SIZE, dtype=DTYPE, device=device, codec=codec)
    decoder = CudaDecoder(model, pool, batch)
    tables = torch.arange(1, blocks * batch + 1, dtype=torch.int32, device=device).view(batch, blocks)
    tokens = torch.ones(batch, 1, dtype=torch.int32, device=device)
    starts = torch.full((batch,), context, dtype=torch.int32, device=device)
    counts = torch.zeros(batch, dtype=torch.int32, device=device)
    decoder.step(tokens, tables, starts, counts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            decoder.step(tokens, tables, starts, counts)
    times: list[float] = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / STEPS)
    return statistics.median(times)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2-7b", help="a preset")
    parser.add_argument("--layers", type=int, help="default: as many as in the preset")
    parser.add_argument("--weights", nargs="+", default=["bf16"], choices=["bf16", "int8", "fp8", "int4"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1], choices=BATCH_SIZES)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--kv-cache", nargs="+", default=["none"], choices=KV_CODECS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = preset(args.model)
    config = replace(config, num_layers=args.layers or config.num_layers)
    bandwidth = READ_BANDWIDTH.get(torch.cuda.get_device_name())
    results: dict[str, Any] = {"model": args.model, "layers": config.num_layers, "context": args.context}
    for weights in args.weights:
        model: Any = init_model(config, torch.device("cuda"), DTYPE).eval()
        if weights != "bf16":
            quantize_(model, weights)
        for batch, codec in itertools.product(args.batch, args.kv_cache):
            seconds = step_seconds(model, batch, args.context, codec)
            nbytes = step_bytes(model, batch, args.context, codec)
            share = nbytes / bandwidth / seconds if bandwidth else None
            name = f"{weights}, batch {batch}" + (f", {codec} KV cache" if codec != "none" else "")
            results[name] = {
                "us": seconds * 1e6, "bytes": nbytes, "share": share, "tokens_per_second": batch / seconds
            }  # fmt: skip
            rate = f"{batch / seconds:,.0f} tokens/s"
            print(f"{name}: {seconds * 1e6:.1f} us, share {share or 0:.3f}, {rate}", flush=True)
            record("decode_step", results, args.out)


if __name__ == "__main__":
    main()
