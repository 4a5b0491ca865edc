"""LoRA and QLoRA fine-tuning compared with transformers + PEFT: tokens/s, peak memory, predicted memory.

    python bench/finetune.py --device cuda --shape llama3.1-8b --out bench/results/finetune-8b.json
    python bench/finetune.py --device cpu --shape tiny

Each contender trains in a separate process, on the same packed rows of random tokens: 8,192 tokens per step in rows of
2,048, adapters of rank 16 on all linear layers, activation checkpointing, AdamW. Whimbrel trains with its `Trainer`.
The baseline is a bare loop: bf16 weights, fp32 adapters and autocast, as in `transformers.Trainer` and TRL. It either
isolates packed samples (`position_ids`, as Whimbrel does), or lets tokens attend across samples, which is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from record import record
from timing import now
from whimbrel.base.files import format_bytes
from whimbrel.data.packing import PackedRows, SampleStats, TokenizedSamples
from whimbrel.models import GPT, GPTConfig, preset
from whimbrel.models.families import config_to_hf
from whimbrel.models.lora import initialize_lora
from whimbrel.precision import QuantizedWeight
from whimbrel.train import RunConfig, Trainer, TrainerCallback
from whimbrel.train.memory import empty_model, predict_memory
from whimbrel.train.run_config import build_run_config

TOKENS_PER_STEP = 8192
ROW_TOKENS = 2048
WARMUP_STEPS = 3
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
CONTENDERS: dict[str, dict[str, Any]] = {
    "transformers + PEFT": {"peer": True, "micro_batch": 4},
    "transformers + PEFT, samples not isolated": {"peer": True, "micro_batch": 4, "isolated": False},
    "LoRA": {"micro_batch": 4},
    "QLoRA int8": {"micro_batch": 4, "weights": "int8"},
    "QLoRA int4": {"micro_batch": 4, "weights": "int4"},
    "QLoRA int4, micro-batch 1": {"micro_batch": 1, "weights": "int4"},
}


def model_config(shape: str) -> GPTConfig:
    """Shape of the model; `tiny` is for smoke tests."""
    if shape != "tiny":
        return preset(shape)
    return GPTConfig(
        vocab_size=512, context_length=ROW_TOKENS, num_layers=2, embd_size=64, num_heads=4, num_kv_heads=2,
        mlp_size=128, position="rope", norm="rms", activation="silu", gated_mlp=True, bias="none",
    )  # fmt: skip


def packed_rows(vocab_size: int, rows: int, seed: int = 0) -> PackedRows:
    """Rows of samples with random tokens; lengths are those of chats (median 350 tokens), half of them supervised."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(350), 0.8, 8 * rows).astype(np.int64), 16, ROW_TOKENS)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ids = rng.integers(0, vocab_size, offsets[-1], dtype=np.int64)
    mask = np.concatenate([np.arange(length) >= length // 2 for length in lengths])
    samples = TokenizedSamples(ids, mask, offsets, settings={"seed": seed}, stats=SampleStats(samples=len(lengths)))
    return PackedRows(samples, ROW_TOKENS, pad_id=0)


def run_config(shape: str, folder: Path, device: str, micro_batch: int, steps: int, weights: str | None) -> RunConfig:
    """The config that `whimbrel finetune` would write for a model of this shape."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config_to_hf(model_config(shape))), encoding="utf-8")
    on_gpu = {"precision": "bf16", "default_dtype": "bfloat16", "compile": True} if device == "cuda" else {}
    return build_run_config(
        {
            "output_dir": str(folder / "run"),
            "model": {"path": str(model), **({} if weights is None else {"weights": weights})},
            "data": {"path": ["samples.jsonl"], "sequence_length": ROW_TOKENS},
            "train": {
                "device": device, "steps": steps, "micro_batch": micro_batch, "recompute": "full", "clip": 1.0,
                "accumulation": TOKENS_PER_STEP // ROW_TOKENS // micro_batch, **on_gpu,
            },
            "optim": {"lr": 2e-4},
            "lora": {"rank": 16, "alpha": 32.0},
            "checkpoint": {"at_end": False, "every_minutes": None},
        }
    )  # fmt: skip


@torch.no_grad()
def random_model(config: RunConfig, device: torch.device) -> GPT:
    """A model with random weights and new adapters, allocated in its final format."""
    model = empty_model(config, device)
    for parameter in model.parameters():
        if isinstance(parameter, QuantizedWeight):
            parameter.codes.view(torch.uint8).random_(0, 256)
            parameter.scales.fill_(5e-3 if parameter.format.name == "int4" else 3e-4)
        elif not parameter.requires_grad:
            parameter.fill_(1) if parameter.dim() == 1 else parameter.normal_(std=0.02)
    initialize_lora(model, 0)
    return model


class StepTimer(TrainerCallback):
    """Records when each step starts and the last one ends."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, list[float]()

    def on_step_begin(self, **event: Any) -> None:
        """Record the time after earlier steps have finished on the device."""
        self.times.append(now(self.device))

    def on_train_end(self, **event: Any) -> None:
        """Record the end of the last step."""
        self.times.append(now(self.device))


def train_whimbrel(args: argparse.Namespace, micro_batch: int, weights: str | None = None) -> list[float]:
    """Train with `Trainer`; returns the start time of each step and the end of the last."""
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(args.shape, Path(folder), args.device, micro_batch, args.steps, weights)
        model = random_model(config, device)
        rows = packed_rows(config.model.vocab_size, TOKENS_PER_STEP // ROW_TOKENS * (args.steps + 2))
        timer = StepTimer(device)
        Trainer(config, model, train_dataset=rows, callbacks=[timer]).train()
    return timer.times


def train_peer(args: argparse.Namespace, micro_batch: int, isolated: bool = True) -> list[float]:
    """Train with transformers and PEFT; returns the start time of each step and the end of the last."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    device, dtype = torch.device(args.device), torch.bfloat16 if args.device == "cuda" else torch.float32
    settings = config_to_hf(model_config(args.shape))
    torch.set_default_dtype(dtype)
    with device:
        base = LlamaForCausalLM(LlamaConfig(**settings))
    torch.set_default_dtype(torch.float32)
    base.config.use_cache = False
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=args.device == "cuda" or None)
    rows = packed_rows(settings["vocab_size"], TOKENS_PER_STEP // ROW_TOKENS * (args.steps + 2))
    micro_batches = batches(rows, micro_batch, device)
    times = []
    model.train()
    for _ in range(args.steps):
        times.append(now(device))
        step = [next(micro_batches) for _ in range(TOKENS_PER_STEP // ROW_TOKENS // micro_batch)]
        count = sum((batch["targets"] != -100).sum() for batch in step)
        for batch in step:
            labels = torch.nn.functional.pad(batch["targets"][:, :-1], (1, 0), value=-100)
            positions = {"position_ids": batch["position_ids"]} if isolated else {}
            with torch.autocast(device.type, torch.bfloat16, enabled=args.device == "cuda"):
                loss = model(
                    input_ids=batch["input_ids"], labels=labels, num_items_in_batch=count, **positions
                ).loss  # fmt: skip
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    times.append(now(device))
    return times


def batches(rows: PackedRows, micro_batch: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of consecutive rows."""
    for start in range(0, len(rows) - micro_batch + 1, micro_batch):
        examples = [rows[start + offset] for offset in range(micro_batch)]
        yield {
            name: torch.from_numpy(np.stack([row[name] for row in examples])).to(device) for name in examples[0]
        }  # fmt: skip


def measure(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Tokens/s and peak memory of one contender."""
    train: Callable[..., list[float]] = train_peer if settings.pop("peer", False) else train_whimbrel
    if args.profile:
        return profile(train, args, settings)
    times = train(args, **settings)
    seconds = [end - start for start, end in pairwise(times)][WARMUP_STEPS:]
    result: dict[str, Any] = {
        "tokens_per_second": TOKENS_PER_STEP / statistics.median(seconds), "step_seconds": seconds,
    }  # fmt: skip
    if args.device == "cuda":
        result |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return result


def profile(train: Callable[..., list[float]], args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """GPU milliseconds per step of the slowest kernels."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CUDA if args.device == "cuda" else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        times = train(args, **settings)
    kernels = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)[:40]
    return {
        "tokens_per_second": TOKENS_PER_STEP / (times[-1] - times[-2]),
        "kernels": {
            event.key[:100]: [event.self_device_time_total / 1e3 / args.steps, event.count / args.steps]
            for event in kernels
        },
    }


def measure_in_subprocess(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a subprocess. If it fails, `failed` is the last line of its stderr."""
    options = [f"--device={args.device}", f"--shape={args.shape}", f"--steps={args.steps}"]
    options += ["--profile"] if args.profile else []
    completed = subprocess.run(
        [sys.executable, __file__, *options, "--measure", json.dumps(settings)],
        env=os.environ | SEGMENTS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if completed.returncode:
        return {"failed": completed.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return result


def predict(args: argparse.Namespace, micro_batch: int, weights: str | None = None) -> dict[str, Any]:
    """The predicted memory of a Whimbrel contender."""
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(args.shape, Path(folder), args.device, micro_batch, args.steps, weights)
        [prediction] = predict_memory(config, args.device)
    fields = asdict(prediction)
    return {name: fields[name] for name in ("peak", "phase", "at_peak")}


def describe(name: str, result: dict[str, Any], peer: dict[str, Any] | None) -> str:
    """One line of results, with ratios to the baseline."""
    if "failed" in result:
        return f"{name:42} failed: {result['failed']}"
    line = f"{name:42} {result['tokens_per_second']:8.0f} tokens/s"
    if peer is not None and "failed" not in peer:
        line += f" ({result['tokens_per_second'] / peer['tokens_per_second']:.2f}x)"
    if "allocated" in result:
        line += f", {format_bytes(result['allocated'])} allocated, {format_bytes(result['reserved'])} reserved"
        if peer is not None and "allocated" in peer:
            line += f" ({result['allocated'] / peer['allocated']:.2f}x)"
    if "predicted" in result:
        peak = result["predicted"]["peak"]
        line += f", predicted {format_bytes(peak)}"
        line += f" ({peak / result['allocated']:.3f}x)" if "allocated" in result else ""
    return line


def main() -> None:
    """Measure all contenders and compare them with the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", default="tiny", help="tiny, or the name of a preset")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--only", action="append", choices=list(CONTENDERS), help="contenders to measure")
    parser.add_argument("--profile", action="store_true", help="list the slowest kernels instead of measuring memory")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args, json.loads(args.measure))))
        return
    results: dict[str, Any] = {}
    for name in args.only or CONTENDERS:
        settings = CONTENDERS[name]
        results[name] = measure_in_subprocess(args, dict(settings))
        if not settings.get("peer") and "failed" not in results[name] and not args.profile:
            results[name]["predicted"] = predict(args, **settings)
        print(describe(name, results[name], results.get("transformers + PEFT")), flush=True)
        for kernel, (milliseconds, count) in results[name].get("kernels", {}).items():
            print(f"    {milliseconds:9.2f} ms {count:7.0f}  {kernel}", flush=True)
    record("finetune", {"shape": args.shape, "tokens_per_step": TOKENS_PER_STEP, **results}, args.out)


if __name__ == "__main__":
    main()
