"""Tokens per second of greedy decoding, compared with `transformers.generate` in the same process.

    python bench/decode.py --device cuda --model gpt2 --batch 1 --batch 64 --out decode-gpt2.json
    python bench/decode.py --device cuda --model llama2-7b --batch 1 --new 128 [--weights int4 --no-transformers]
    python bench/decode.py --device cpu --model demo --rounds 20 --clock cpu

Ours is `LLM.generate` with its defaults (on a GPU, CUDA graphs, and for up to eight sequences one kernel per step), or
compiled and without that kernel; theirs has a dynamic cache, or a static cache with a compiled step. All get the same
prompts of random tokens, the time includes prefill, and contenders are interleaved.
`--clock cpu` measures the CPU time of the process, for machines that are shared with other work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch._dynamo.utils import counters

import whimbrel
import whimbrel.hf
from record import record
from timing import init_model, now
from whimbrel.inference import LLM, SamplingParams
from whimbrel.inference.cuda_decoder import BATCH_SIZES
from whimbrel.models import GPTConfig, preset
from whimbrel.precision import quantize_
from whimbrel.train import load_run_config

READ_BANDWIDTH = {"NVIDIA H200": 4.54e12}
"""Bytes per second by GPU, measured with a copy kernel."""
SHARED_MEMORY = Path("/dev/shm")
Contender = Callable[[list[list[int]]], list[list[int]]]


def model_config(name: str) -> GPTConfig:
    """Config of a preset, or of the model of `make demo`."""
    if name != "demo":
        return preset(name)
    return load_run_config("shakespeare-cpu").model.architecture


def ours(model: Any, batch: int, prompt: int, new: int, **options: Any) -> Contender:
    """`LLM.generate` without a prefix cache, so that every prompt is prefilled."""
    chunk = prompt * batch  # prefill all prompts at once, as the others do
    llm = LLM(model, max_batch=batch, prefix_cache=False, prefill_chunk=chunk, **options)
    greedy = SamplingParams(temperature=0)

    def run(prompts: list[list[int]]) -> list[list[int]]:
        return [output.outputs[0].tokens for output in llm.generate(prompts, greedy, max_new_tokens=new)]

    return run


def theirs(model: Any, new: int, *, static: bool) -> Contender:
    """`transformers.generate`."""
    settings: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    if static:
        settings["cache_implementation"] = "static"

    def run(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts, device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        tokens: list[list[int]] = out[:, ids.size(1) :].tolist()
        return tokens

    return run


def transformers_model(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The same model in `transformers`, saved to shared memory and loaded from there."""
    with TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder:
        whimbrel.save_model(model, folder)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device).eval()


def measure(
    contenders: dict[str, Contender], device: torch.device, args: argparse.Namespace, batch: int
) -> dict[str, Any]:
    """Seconds of each contender in each round, after one warmup run of each."""
    generator = torch.Generator().manual_seed(0)

    def clock() -> float:
        return time.process_time() if args.clock == "cpu" else now(device)

    def random_prompts() -> list[list[int]]:
        ids: list[list[int]] = torch.randint(0, 2000, (batch, args.prompt), generator=generator).tolist()
        return ids

    results: dict[str, Any] = {}
    for name, generate in contenders.items():
        prompts = random_prompts()
        start = clock()
        generate(prompts)
        results[name] = {"first_seconds": clock() - start, "seconds": []}
    compiled_before = dict(counters["stats"])
    for _ in range(args.rounds):
        prompts = random_prompts()
        outputs = {}
        for name, generate in contenders.items():
            before = torch.cuda.memory_stats()["num_device_alloc"] if device.type == "cuda" else 0
            start = clock()
            outputs[name] = generate(prompts)
            results[name]["seconds"].append(clock() - start)
            if device.type == "cuda":
                results[name]["device_allocations"] = torch.cuda.memory_stats()["num_device_alloc"] - before
        ours = next(iter(outputs.values()))
        for name, output in outputs.items():
            pairs = (pair for rows in zip(ours, output, strict=True) for pair in zip(*rows, strict=True))
            same = sum(a == b for a, b in pairs)
            results[name]["same_tokens"] = same / (batch * args.new)
    for result in results.values():
        result["tokens_per_second"] = batch * args.new / median(result["seconds"])
        if "transformers" in results:
            result["speedup"] = median(results["transformers"]["seconds"]) / median(result["seconds"])
    return {"contenders": results, "recompiled": dict(counters["stats"]) != compiled_before}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="demo", help="demo, or a preset: gpt2, llama2-7b")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--weights", help="format that our weights are quantized to: int8, int4 or fp8")
    parser.add_argument("--only", nargs="+", help="names of the contenders to measure")
    parser.add_argument("--no-transformers", action="store_true", help="do not measure transformers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = model_config(args.model)
    args.new = min(args.new, config.context_length - args.prompt)
    model = init_model(config, device, dtype).eval()
    reference = None if args.no_transformers else transformers_model(model, device, dtype)
    if args.weights is not None:
        quantize_(model, args.weights)
    results: dict[str, Any] = {
        "model": args.model,
        "weights": args.weights,
        "device": args.device,
        "prompt": args.prompt,
        "new": args.new,
    }
    bandwidth = READ_BANDWIDTH.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if bandwidth is not None:
        results["limit_tokens_per_second"] = bandwidth / sum(p.nbytes for p in model.parameters())
    for batch in args.batch or [1]:
        variants: dict[str, dict[str, Any]] = {"whimbrel": {}, "whimbrel compiled": {"compile": True}}
        if device.type == "cuda" and batch in BATCH_SIZES:
            variants["whimbrel compiled"]["gpu_kernels"] = False
        contenders = {
            name: ours(model, batch, args.prompt, args.new, **options)
            for name, options in variants.items()
            if name in (args.only or variants)
        }
        if reference is not None:
            contenders |= {"transformers": theirs(reference, args.new, static=False)}
            if args.model != "demo":  # our own family has no static cache in transformers
                contenders |= {"transformers static compiled": theirs(reference, args.new, static=True)}
        measured = measure(contenders, device, args, batch)
        for name, result in measured["contenders"].items():
            print(
                f"batch {batch:3} {name:30} {result['tokens_per_second']:10.1f} tok/s, "
                f"{result.get('speedup', 1):5.2f}x, first {result['first_seconds']:.1f} s, "
                f"same tokens {result['same_tokens']:.3f}"
            )
        results[f"batch {batch}"] = measured
        record("decode", results, args.out)


if __name__ == "__main__":
    main()
