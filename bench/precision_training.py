"""Loss of low-precision training: `bench/precision.py fp8-loss` and `qat`."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from timing import TINY, compile_blocks, init_model, llama
from whimbrel.data import TokenDataLoader
from whimbrel.models import GPT
from whimbrel.optim import OptimConfig, ScheduleConfig, build_optimizer, lr_factor
from whimbrel.precision.recipes import finalize, prepare, recipe_names
from whimbrel.train.build import classified_parameters

__all__ = ["measure_fp8_loss", "measure_qat"]


class Experiment:
    """Trains small models on GPT-2 shards and measures their held-out loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.data is None:
            raise SystemExit(f"{args.benchmark} needs --data: GPT-2 shards with a validation split")
        self.args, self.device = args, args.device
        batch, context = (2, 32) if args.tiny else (64, 512)
        shape = TINY if args.tiny else {"width": 512, "layers": 10, "heads": 8, "kv_heads": 8, "mlp": 1408}
        self.config = llama(**shape, vocab=50_257, context=context)
        self.train, self.held_out = (
            TokenDataLoader(args.data, batch, context, split=split, device=self.device) for split in ("train", "val")
        )
        self.batches = 2 if args.tiny else 30

    def train_model(self, model: GPT, steps: int, *, lr: float, first: int = 0) -> float:
        """Train in place, starting at batch `first`. Returns the held-out loss."""
        optimizer = build_optimizer(
            OptimConfig(name="adamw", lr=lr, betas=(0.9, 0.95), weight_decay=0.1), classified_parameters(model)
        )
        schedule = ScheduleConfig(name="cosine", warmup_steps=max(1, steps // 10), min_lr_ratio=0.1)
        self.train.reset()
        for _ in range(first):
            self.train.next_batch()
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * lr_factor(schedule, step, steps)
            self.loss(model, self.train).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return self.evaluate(model)

    def loss(self, model: nn.Module, loader: TokenDataLoader) -> Tensor:
        """Loss of the next batch under bf16 autocast."""
        x, y = loader.next_batch()
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss: Tensor = model(x, targets=y).loss
        return loss

    def with_weights(self, state: dict[str, Tensor]) -> GPT:
        """An unquantized model with these weights."""
        model = init_model(self.config, self.device, torch.float32)
        model.load_state_dict(state)
        return model

    def evaluate(self, model: nn.Module) -> float:
        """Mean loss on fixed held-out batches; gradients stay enabled so that blocks are not recompiled."""
        self.held_out.reset()
        return statistics.mean(self.loss(model, self.held_out).item() for _ in range(self.batches))


def measure_fp8_loss(args: argparse.Namespace) -> dict[str, Any]:
    """Held-out loss in bf16 with each seed, and with each recipe and the first seed."""
    experiment, steps = Experiment(args), 3 if args.tiny else args.steps

    def loss(name: str, seed: int) -> float:
        model = init_model(experiment.config, experiment.device, torch.float32, seed)
        if name != "bf16":
            prepare(model, name, precision="bf16")
        start = time.perf_counter()
        held_out = experiment.train_model(compile_blocks(model, args.compile), steps, lr=args.lr)
        print(
            f"{name:20} seed {seed}: {held_out:.4f} after {steps} steps, {time.perf_counter() - start:.1f} s",
            flush=True,
        )
        return held_out

    losses = [loss("bf16", seed) for seed in range(args.seeds)]
    recipe_losses = {name: loss(name, 0) for name in recipe_names("fp8") if name != "delayed"}
    std = statistics.stdev(losses)
    return {
        "steps": steps,
        "bf16": {"losses": losses, "mean": statistics.mean(losses), "std": std},
        **{
            name: {
                "loss": held_out,
                "minus_same_seed": held_out - losses[0],
                "minus_mean_in_std": (held_out - statistics.mean(losses)) / std,
                "at_most_max": held_out <= max(losses),
            }
            for name, held_out in recipe_losses.items()
        },
    }


def measure_qat(args: argparse.Namespace) -> dict[str, Any]:
    """Loss increase from quantizing a fine-tuned model, and how much of it quantization-aware fine-tuning recovers."""
    experiment = Experiment(args)
    steps, finetuning_steps = (3, 2) if args.tiny else (args.steps, args.steps // 4)
    lr, baseline = args.lr / 5, init_model(experiment.config, experiment.device, torch.float32)
    trained = experiment.train_model(compile_blocks(baseline, args.compile), steps, lr=args.lr)
    initial = {name: tensor.clone() for name, tensor in baseline.state_dict().items()}
    finetuned = experiment.train_model(baseline, finetuning_steps, lr=lr, first=steps)
    results: dict[str, Any] = {
        "steps": steps, "finetuning_steps": finetuning_steps, "trained": trained, "finetuned": finetuned,
    }  # fmt: skip
    for name in recipe_names("qat"):
        quantized = finalize(experiment.with_weights(baseline.state_dict()), name)
        model = experiment.with_weights(initial)
        prepare(model, name, precision="bf16")
        experiment.train_model(compile_blocks(model, args.compile), finetuning_steps, lr=lr, first=steps)
        with torch.no_grad():
            ptq, qat = experiment.evaluate(quantized), experiment.evaluate(finalize(model, name))
        results[name] = {"ptq": ptq, "gap": ptq - finetuned, "qat": qat, "recovered": (ptq - qat) / (ptq - finetuned)}
        print(
            f"{name:29} unquantized {finetuned:.4f}, quantized {ptq:.4f}, QAT {qat:.4f}: "
            f"{results[name]['recovered']:.0%} of the gap recovered", flush=True,
        )  # fmt: skip
    return results
