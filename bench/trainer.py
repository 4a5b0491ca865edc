"""Overhead of the trainer over a bare loop: same model, batches, optimizer and clipping, interleaved in one process.

    python bench/trainer.py --data data/shakespeare --device cpu --out bench/results/trainer-cpu.json
    python bench/trainer.py --data data/webmix20M --device cuda --out bench/results/trainer-cuda.json

The bare loop is hand-written: next batch, forward, backward, clip, step, zero_grad. The trainer runs the same steps
with its default callbacks: a log of every step, progress lines (discarded), signal handling, live control. Prints the
median ratio and difference of their step times: of pairs of single steps on a CPU, whose speed drifts; of complete
runs on a GPU, which must not be synchronized in every step.
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
from whimbrel.train.callbacks import ProgressCallback

SIZES = {
    "tiny": {"context_length": 64, "num_layers": 2, "embd_size": 64, "num_heads": 2},
    "small": {"context_length": 128, "num_layers": 4, "embd_size": 128, "num_heads": 2},
}
WARMUP_STEPS = 5
Rounds = list[dict[str, float]]


def make_model(size: str, loader_vocab: int) -> GPTConfig:
    """The model config of a size."""
    if size == "gpt2":
        return preset("gpt2")
    return GPTConfig(vocab_size=loader_vocab, position="learned", **SIZES[size])  # type: ignore[arg-type]


class BareLoop:
    """A hand-written training loop, one step at a time."""

    def __init__(self, config: GPTConfig, loader: TokenDataLoader, device: torch.device, bf16: bool) -> None:
        torch.manual_seed(0)
        self.loader, self.device, self.bf16 = loader, device, bf16
        self.model = GPT(config).to(device)
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=1e-3, fused=device.type == "cuda" or None,
        )  # fmt: skip

    def step(self) -> None:
        """Next batch, forward, backward, clip, step, zero."""
        x, y = self.loader.next_batch()
        with torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext():
            loss = self.model(x, targets=y).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Times(TrainerCallback):
    """Times each step. With a bare loop, a bare step runs and is timed before each step of the trainer."""

    def __init__(self, device: torch.device, bare: BareLoop | None = None) -> None:
        self.device, self.bare, self.mark = device, bare, 0.0
        self.own: list[float] = []
        self.bares: list[float] = []

    def on_step_begin(self, **event: Any) -> None:
        """End of the trainer's previous step, including everything after it."""
        if self.bare is None:
            if event["state"].global_step == WARMUP_STEPS:
                self.mark = _now(self.device)
            return
        start = time.perf_counter()
        if self.mark:
            self.own.append(start - self.mark)
        self.bare.step()
        self.mark = time.perf_counter()
        self.bares.append(self.mark - start)

    def on_train_end(self, **event: Any) -> None:
        """Without a bare loop: the mean of all steps, including queued device work."""
        if self.bare is None:
            self.own.append((_now(self.device) - self.mark) / (event["state"].global_step - WARMUP_STEPS))


def train(config: GPTConfig, loader: TokenDataLoader, times: Times, steps: int, bf16: bool) -> None:
    """Run the same steps with the trainer."""
    torch.manual_seed(0)
    loader.reset()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            TrainingArguments(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=loader.B, learning_rate=1e-3,
                weight_decay=0.1, save_strategy="no", use_cpu=times.device.type == "cpu",
                lr_scheduler_type="constant", mixed_precision="bf16" if bf16 else None,
            ),
            GPT(config),
            train_dataset=loader,
            callbacks=[ProgressCallback(Console(file=io.StringIO()), plain=True), times],
        )  # fmt: skip
        trainer.train()


def alternate_runs(
    config: GPTConfig, loaders: list[TokenDataLoader], device: torch.device, steps: int, rounds: int
) -> Rounds:
    """For GPUs: alternate complete runs; the first round is warm-up."""
    found = []
    for number in range(rounds + 1):

        def bare() -> float:
            loop = BareLoop(config, loaders[0], device, bf16=True)
            for step in range(steps):
                if step == WARMUP_STEPS:
                    start = _now(device)
                loop.step()
            return (_now(device) - start) / (steps - WARMUP_STEPS)

        def trainer() -> float:
            times = Times(device)
            train(config, loaders[1], times, steps, bf16=True)
            return times.own[-1]

        contenders = {"bare": bare, "trainer": trainer}
        found.append({name: contenders[name]() for name in (contenders if number % 2 else reversed(contenders))})
    return found[1:]


def alternate_steps(
    config: GPTConfig, loaders: list[TokenDataLoader], device: torch.device, steps: int, rounds: int
) -> Rounds:
    """For CPUs, whose speed drifts: alternate single steps; each round has a new pair of models.

    Memory placement alone changes the speed by 1-2%, also between two bare loops, hence the rounds.
    """
    found = []
    for _ in range(rounds):
        times = Times(device, BareLoop(config, loaders[0], device, bf16=False))
        train(config, loaders[1], times, steps, bf16=False)
        pairs = list(zip(times.bares, times.own, strict=False))[WARMUP_STEPS:]
        bare = statistics.median(bare for bare, _ in pairs)
        found.append({"bare": bare, "trainer": bare + statistics.median(own - bare for bare, own in pairs)})
    return found


def main() -> None:
    """Run both and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="directory of training shards")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=[*SIZES, "gpt2"], action="append")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    results = {}
    for size in arguments.size or (["gpt2"] if device.type == "cuda" else ["tiny", "small"]):
        vocab = 50_257 if size == "gpt2" else 4096
        config = make_model(size, vocab)
        loaders = [
            TokenDataLoader(arguments.data, arguments.batch, config.context_length, device=device, vocab_size=vocab)
            for _ in range(2)
        ]
        if device.type == "cuda":
            rounds = alternate_runs(config, loaders, device, arguments.steps, arguments.rounds)
        else:
            rounds = alternate_steps(config, loaders, device, arguments.steps, arguments.rounds)
        ratio = statistics.median(times["trainer"] / times["bare"] for times in rounds)
        extra = statistics.median(times["trainer"] - times["bare"] for times in rounds)
        results[size] = {"ratio": ratio, "microseconds": extra * 1e6, "rounds": rounds, "batch": arguments.batch}
        step = statistics.median(times["bare"] for times in rounds)
        print(f"{size:6} bare {step * 1e3:.2f} ms per step, trainer {ratio:.4f} x ({extra * 1e6:+.0f} us)")
    record("trainer", {"device": str(device), "threads": torch.get_num_threads(), **results}, arguments.out)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
