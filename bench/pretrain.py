"""Pretraining compared with a common GPT-2 loop on one GPU: same process, initial weights, batches and recipe.

    python bench/pretrain.py --data data/webmix20M --out bench/results/pretrain.json

The reference loop compiles the full model, uses torch's default AdamW, an unpadded vocabulary of 50,257 and
micro-batches of 32 x 1024 under bf16 autocast, and synchronizes every step. Ours is `whimbrel.train` with the recipe
`gpt2-baseline-20m`, and for a few steps with the micro-batch of the reference, to compare memory. Prints tokens/s, MFU,
peak memory, the largest loss difference, and compile time (cold, and warm in a second process, unless
`--no-compile-times`).

    python bench/pretrain.py --data data/webmix20M --no-compile-times --variants ours fp8 seed1 seed2 --steps 300 \
        --reference-steps 20

compares `fp8_recipe = delayed` with the reference, and its loss with bf16 runs from other initial weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from record import record
from whimbrel.data import TokenDataLoader
from whimbrel.models import GPT, GPTConfig
from whimbrel.train import RunConfig, TrainerCallback, load_run_config, train
from whimbrel.train.callbacks.progress import RunSummary
from whimbrel.train.device import choose_device, device_name, peak_flops

RECIPE = "gpt2-baseline-20m"
REFERENCE_BATCH = 32
VARIANTS = {
    "ours": [],
    "ours_same_micro_batch": ["--train.steps=4", f"--train.micro_batch={REFERENCE_BATCH}"],
    "fp8": ["--train.fp8_recipe=delayed"],
    "seed1": ["--train.seed=1"],
    "seed2": ["--train.seed=2"],
}
"""Our runs by name, with their settings."""


class ReferenceBlock(nn.Module):
    """The reference's block: pre-norm, attention branch scaled in the forward pass, exact GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.embd_size
        self.heads, self.scale = config.num_heads, 1 / math.sqrt(2 * config.num_layers)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then MLP."""
        batch, time_, width = x.shape
        q, k, v = self.attn["c_attn"](self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, time_, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.scale * self.attn["c_proj"](y.transpose(1, 2).contiguous().view(batch, time_, width))
        hidden: Tensor = self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))
        return x + hidden


class ReferenceGPT(nn.Module):
    """The reference's model: tied head, full logits, `F.cross_entropy`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.embd_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, width),
                "wpe": nn.Embedding(config.context_length, width),
                "h": nn.ModuleList(ReferenceBlock(config) for _ in range(config.num_layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.lm_head.weight = cast(nn.Embedding, self.transformer["wte"]).weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](positions)
        for block in cast(nn.ModuleList, self.transformer["h"]):
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def run_reference(config: RunConfig, device: torch.device, steps: int) -> dict[str, Any]:
    """The reference's loop, with each step synchronized."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(config.train.seed)
    ours = GPT(config.model.architecture)
    model = ReferenceGPT(config.model.architecture)
    vocab = config.model.vocab_size
    model.load_state_dict({name: t[:vocab] if t.shape[0] > vocab else t for name, t in ours.state_dict().items()})
    model.to(device)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr)
    loader = TokenDataLoader(config.data.shards, REFERENCE_BATCH, config.sequence_length, device=device)
    accumulation = config.tokens_per_step // (REFERENCE_BATCH * config.sequence_length)
    losses, seconds = [], []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for _ in range(accumulation):
            x, y = loader.next_batch()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = compiled(x, y)
            loss = loss / accumulation
            total += loss.detach()
            loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(total.item())
    median = sorted(seconds[1:])[len(seconds[1:]) // 2]
    return {
        "losses": losses,
        "step_seconds": median,
        "tokens_per_second": config.tokens_per_step / median,
        "compile_seconds_cold": seconds[0] - median,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


class MetricsCollector(TrainerCallback):
    """Collects the metrics of a run."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.summary: RunSummary | None = None
        self.validation_loss: float | None = None

    def on_train_begin(self, **event: Any) -> None:
        self.summary = event["summary"]

    def on_train_metrics(self, **event: Any) -> None:
        self.losses.append(event["metrics"]["loss"])
        self.seconds.append(event["metrics"]["seconds"])

    def on_evaluate(self, **event: Any) -> None:
        self.validation_loss = event["metrics"]["eval_loss"]


def run_ours(config: RunConfig) -> dict[str, Any]:
    """Run our recipe with the trainer."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    collected = MetricsCollector()
    result = train(config, callbacks=[collected])
    assert collected.summary is not None
    median = sorted(collected.seconds[1:])[len(collected.seconds[1:]) // 2]
    return {
        "losses": collected.losses,
        "step_seconds": median,
        "tokens_per_second": config.tokens_per_step / median,
        "compile_seconds": result.metrics["compile_seconds"],
        "peak_memory_gib": result.metrics["peak_memory"] / 2**30,
        "micro_batch": (collected.summary.tokens_per_micro_batch or 0) // config.sequence_length,
        "flops_per_token": collected.summary.flops_per_token,
        "validation_loss": collected.validation_loss,
    }


def compile_seconds(args: argparse.Namespace, cache: str) -> float:
    """Compile time in a separate process with the given cache directory."""
    command = [sys.executable, __file__, "--data", str(args.data), "--compile-only"]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output.splitlines()[-1])["compile_seconds"])


def matmul_tflops(device: torch.device) -> float:
    """Throughput of a large bf16 matmul."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        a @ b
    end.record()
    end.synchronize()
    return float(20 * 2 * 8192**3 / (start.elapsed_time(end) / 1000) / 1e12)


def main() -> None:
    """Run both and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="directory of training (and validation) shards")
    parser.add_argument("--steps", type=int, default=38)
    parser.add_argument("--reference-steps", type=int, help="steps of the reference loop (default: --steps)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["ours", "ours_same_micro_batch"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile-times", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile-only", action="store_true", help="print our compile time and exit")
    args = parser.parse_args()
    device = choose_device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"--data.path={args.data}", "--train.micro_batch=none"]
        config = load_run_config(RECIPE, [*overrides, f"--train.steps={args.steps}"])
        if args.compile_only:
            only = load_run_config(RECIPE, [*overrides, f"--output_dir={folder}/run", "--train.steps=2"])
            print(json.dumps({"compile_seconds": run_ours(only)["compile_seconds"]}))
            return
        compile_times = {}
        if args.compile_times:
            compile_times["compile_seconds_cold"] = compile_seconds(args, f"{folder}/cache")
            compile_times["compile_seconds_warm"] = compile_seconds(args, f"{folder}/cache")
        reference = run_reference(config, device, args.reference_steps or args.steps)
        print("reference", json.dumps(reference), flush=True)
        torch._dynamo.reset()
        results: dict[str, Any] = {"reference": reference}
        for name in args.variants:
            # a directory of its own for each run; later settings override earlier ones
            settings = [f"--output_dir={folder}/{name}", f"--train.steps={args.steps}", *VARIANTS[name]]
            results[name] = run_ours(load_run_config(RECIPE, [*overrides, *settings]))
            print(name, json.dumps(results[name]), flush=True)
    if "ours" in results:
        results["ours"] |= compile_times
    peak = peak_flops(device)
    for name, result in results.items():
        rate = result["tokens_per_second"]
        result["mfu"] = results[args.variants[0]]["flops_per_token"] * rate / peak if peak else None
        result["speedup"] = rate / reference["tokens_per_second"]
        result["memory_ratio"] = result["peak_memory_gib"] / reference["peak_memory_gib"]
        result["max_loss_difference"] = max(
            abs(a - b) for a, b in zip(reference["losses"], result["losses"], strict=False)
        )
        print(
            f"{name:21} {rate:>10,.0f} tokens/s ({result['speedup']:.3f}x)  MFU {result['mfu'] or 0:.1%}  "
            f"{result['peak_memory_gib']:.1f} GiB ({result['memory_ratio']:.2f}x)  loss {result['losses'][0]:.4f} -> "
            f"{result['losses'][-1]:.4f}, largest difference {result['max_loss_difference']:.4f}, validation loss "
            f"{result.get('validation_loss') or math.nan:.4f}"
        )
    if compile_times:
        print(", ".join(f"{name}: {seconds:.1f}" for name, seconds in compile_times.items()))
    results |= {
        "bf16_matmul_tflops": matmul_tflops(device),
        "peak_flops_assumed": peak,
        "device": device_name(device),
    }
    record("pretrain", results, args.out)


if __name__ == "__main__":
    main()
