"""What the trainer costs beside a bare loop: the same model, batches, optimizer and clipping, in turns, in one process.

    python bench/trainer.py --data data/shakespeare --device cpu --out bench/results/trainer-cpu.json
    python bench/trainer.py --data data/webmix20M --device cuda --out bench/results/trainer-cuda.json

The bare loop is what a person writes by hand: next batch, forward, backward, clip, step, zero. The trainer does the
same steps with its default callbacks: log of every step, progress lines (to nowhere), drain on signals, live control.
Printed: the median over rounds of the ratio of their times per step, and the difference in microseconds.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from record import record
from whimbrel.data import TokenDataLoader
from whimbrel.models import GPT, GPTConfig, preset
from whimbrel.train import Trainer, TrainerCallback, TrainingArguments
from whimbrel.train.callbacks import ControlCallback, DrainOnSignal, JsonLogCallback, ProgressCallback

SIZES = {
    "tiny": {"context_length": 64, "num_layers": 2, "embd_size": 64, "num_heads": 2},
    "small": {"context_length": 128, "num_layers": 4, "embd_size": 128, "num_heads": 2},
}
WARM = 5


def make_model(size: str, loader_vocab: int) -> GPTConfig:
    """The model of a size: ours by hand, or GPT-2's 124M."""
    if size == "gpt2":
        return preset("gpt2")
    return GPTConfig(vocab_size=loader_vocab, position="learned", **SIZES[size])  # type: ignore[arg-type]


class Times(TrainerCallback):
    """When steps ended."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.start, self.end = device, 0.0, 0.0

    def on_step_end(self, **event: Any) -> None:
        """Mark the end of the warm-up."""
        if event["state"].global_step == WARM:
            self.start = _now(self.device)

    def on_train_end(self, **event: Any) -> None:
        """Mark the end."""
        del event
        self.end = _now(self.device)


def bare(config: GPTConfig, loader: TokenDataLoader, device: torch.device, steps: int, bf16: bool) -> float:
    """Seconds a step of the loop by hand."""
    torch.manual_seed(0)
    model = GPT(config).to(device)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-3, fused=device.type == "cuda" or None,
    )  # fmt: skip
    loader.reset()
    start = 0.0
    for step in range(steps):
        if step == WARM:
            start = _now(device)
        x, y = loader.next_batch()
        with torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext():
            loss = model(x, y).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (_now(device) - start) / (steps - WARM)


def trained(config: GPTConfig, loader: TokenDataLoader, device: torch.device, steps: int, bf16: bool) -> float:
    """Seconds a step of the trainer."""
    torch.manual_seed(0)
    loader.reset()
    times = Times(device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            TrainingArguments(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=loader.B, learning_rate=1e-3,
                weight_decay=0.1, save_strategy="no", use_cpu=device.type == "cpu", lr_scheduler_type="constant",
                mixed_precision="bf16" if bf16 else None,
            ),
            GPT(config),
            train_dataset=loader,
            callbacks=[
                JsonLogCallback(), ProgressCallback(Console(file=io.StringIO()), plain=True), DrainOnSignal(),
                ControlCallback(), times,
            ],
        )  # fmt: skip
        trainer.train()
    return (times.end - times.start) / (steps - WARM)


def main() -> None:
    """Run both in turns and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="shards of split train")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=[*SIZES, "gpt2"], action="append")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    results = {}
    for size in arguments.size or (["gpt2"] if device.type == "cuda" else ["tiny", "small"]):
        vocab = 50_257 if size == "gpt2" else 4096
        config = make_model(size, vocab)
        loader = TokenDataLoader(
            arguments.data, arguments.batch, config.context_length, device=device, vocab_size=vocab
        )
        rounds = []
        for number in range(arguments.rounds + 1):
            legs = [("bare", bare), ("trainer", trained)]
            times = {
                name: leg(config, loader, device, arguments.steps, device.type == "cuda")
                for name, leg in (legs if number % 2 else legs[::-1])
            }
            if number:  # the first round warms up
                rounds.append(times)
        ratio = statistics.median(times["trainer"] / times["bare"] for times in rounds)
        extra = statistics.median(times["trainer"] - times["bare"] for times in rounds)
        results[size] = {"ratio": ratio, "microseconds": extra * 1e6, "rounds": rounds, "batch": arguments.batch}
        step = statistics.median(times["bare"] for times in rounds)
        print(f"{size:6} bare {step * 1e3:.2f} ms a step, trainer {ratio:.4f} x ({extra * 1e6:+.0f} us)")
    record("trainer", {"device": str(device), "threads": torch.get_num_threads(), **results}, arguments.out)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
