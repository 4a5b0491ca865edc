"""Loss of training in low precision: parts `fp8-loss` and `qat` of bench/precision.py."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from timing import TINY, compiled, init_model, llama
from whimbrel.data import TokenDataLoader
from whimbrel.models import GPT
from whimbrel.optim import OptimConfig, ScheduleConfig, build_optimizer, lr_factor
from whimbrel.precision.recipes import finalize, prepare, recipe_names
from whimbrel.train.build import routed_parameters

__all__ = ["measure_fp8_loss", "measure_qat"]


class Experiment:
    """Trains small models on GPT-2 shards and measures their held-out loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.data is None:
            raise SystemExit(f"{args.part} needs --data: GPT-2 shards with a validation split")
        self.args, self.device = args, args.device
        batch, context = (2, 32) if args.tiny else (64, 512)
        shape = TINY if args.tiny else {"width": 512, "layers": 10, "heads": 8, "kv_heads": 8, "mlp": 1408}
        self.config = llama(**shape, vocab=50_257, context=context)
        self.train, self.held_out = (
            TokenDataLoader(args.data, batch, context, split=split, device=self.device) for split in ("train", "val")
        )
        self.batches = 2 if args.tiny else 30

    def train_model(self, model: GPT, steps: int, *, lr: float, first: int = 0) -> float:
        """Train in place on the batches from `first` on; returns the held-out loss."""
        optimizer = build_optimizer(
            OptimConfig(name="adamw", lr=lr, betas=(0.9, 0.95), weight_decay=0.1), routed_parameters(model)
        )
        schedule = ScheduleConfig(name="cosine", warmup_steps=max(1, steps // 10), floor=0.1)
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
    """Held-out loss in bf16 with each seed, and in each recipe with the first."""
    experiment, steps = Experiment(args), 3 if args.tiny else args.steps

    def loss(name: str, seed: int) -> float:
        model = init_model(experiment.config, experiment.device, torch.float32, seed)
        if name != "bf16":
            prepare(model, name, precision="bf16")
        start = time.perf_counter()
        found = experiment.train_model(compiled(model, args.compile), steps, lr=args.lr)
        print(
            f"{name:20} seed {seed}: {found:.4f} after {steps} steps, {time.perf_counter() - start:.1f} s", flush=True
        )
        return found

    seeds = [loss("bf16", seed) for seed in range(args.seeds)]
    recipes = {name: loss(name, 0) for name in recipe_names("compute")}
    spread = statistics.stdev(seeds)
    return {
        "steps": steps,
        "bf16": {"losses": seeds, "mean": statistics.mean(seeds), "deviation": spread},
        **{
            name: {
                "loss": found,
                "over_same_seed": found - seeds[0],
                "in_deviations": (found - statistics.mean(seeds)) / spread,
                "within_band": found <= max(seeds),
            }
            for name, found in recipes.items()
        },
    }


def measure_qat(args: argparse.Namespace) -> dict[str, Any]:
    """Loss of quantization after fine-tuning, and how much of it quantization-aware fine-tuning recovers."""
    experiment = Experiment(args)
    steps, tuning = (3, 2) if args.tiny else (args.steps, args.steps // 4)
    rate, plain = args.lr / 5, init_model(experiment.config, experiment.device, torch.float32)
    trained = experiment.train_model(compiled(plain, args.compile), steps, lr=args.lr)
    start = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    tuned = experiment.train_model(plain, tuning, lr=rate, first=steps)
    found: dict[str, Any] = {"steps": steps, "tuning_steps": tuning, "trained": trained, "tuned": tuned}
    for name in recipe_names("qat"):
        quantized = finalize(experiment.with_weights(plain.state_dict()), name)
        model = experiment.with_weights(start)
        prepare(model, name, precision="bf16")
        experiment.train_model(compiled(model, args.compile), tuning, lr=rate, first=steps)
        with torch.no_grad():
            ptq, qat = experiment.evaluate(quantized), experiment.evaluate(finalize(model, name))
        found[name] = {"ptq": ptq, "gap": ptq - tuned, "qat": qat, "recovered": (ptq - qat) / (ptq - tuned)}
        print(
            f"{name:29} unquantized {tuned:.4f}, quantized {ptq:.4f}, QAT {qat:.4f}: "
            f"{found[name]['recovered']:.0%} of the gap recovered", flush=True,
        )  # fmt: skip
    return found
