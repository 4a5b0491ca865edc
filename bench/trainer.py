"""Overhead of the trainer over a bare loop: same model, batches, optimizer and clipping, interleaved in one process.

    python bench/trainer.py --data data/shakespeare-cpu --device cpu --out bench/results/trainer-cpu.json
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
from timing import now
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


def model_config(size: str, loader_vocab: int) -> GPTConfig:
    """Model config of a size."""
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


class StepTimer(TrainerCallback):
    """Times each step. With a bare loop, a bare step runs and is timed before each step of the trainer."""

    def __init__(self, device: torch.device, bare: BareLoop | None = None) -> None:
        self.device, self.bare, self.mark = device, bare, 0.0
        self.trainer_times: list[float] = []
        self.bare_times: list[float] = []

    def on_step_begin(self, **event: Any) -> None:
        """The trainer's previous step ends here, including everything after the optimizer step."""
        if self.bare is None:
            if event["state"].global_step == WARMUP_STEPS:
                self.mark = now(self.device)
            return
        start = time.perf_counter()
        if self.mark:
            self.trainer_times.append(start - self.mark)
        self.bare.step()
        self.mark = time.perf_counter()
        self.bare_times.append(self.mark - start)

    def on_train_end(self, **event: Any) -> None:
        """Without a bare loop: the mean of all steps, including queued device work."""
        if self.bare is None:
            self.trainer_times.append((now(self.device) - self.mark) / (event["state"].global_step - WARMUP_STEPS))


def train(config: GPTConfig, loader: TokenDataLoader, timer: StepTimer, steps: int, bf16: bool) -> None:
    """Run the same steps with the trainer."""
    torch.manual_seed(0)
    loader.reset()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            TrainingArguments(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=loader.B, learning_rate=1e-3,
                weight_decay=0.1, save_strategy="no", use_cpu=timer.device.type == "cpu",
                lr_scheduler_type="constant", mixed_precision="bf16" if bf16 else None,
            ),
            GPT(config),
            train_dataset=loader,
            callbacks=[ProgressCallback(Console(file=io.StringIO()), plain=True), timer],
        )  # fmt: skip
        trainer.train()


def alternate_runs(
    config: GPTConfig, loaders: list[TokenDataLoader], device: torch.device, steps: int, rounds: int
) -> Rounds:
    """For GPUs: alternate complete runs; the first round is warmup."""
    measured = []
    for number in range(rounds + 1):

        def bare() -> float:
            loop = BareLoop(config, loaders[0], device, bf16=True)
            for step in range(steps):
                if step == WARMUP_STEPS:
                    start = now(device)
                loop.step()
            return (now(device) - start) / (steps - WARMUP_STEPS)

        def trainer() -> float:
            timer = StepTimer(device)
            train(config, loaders[1], timer, steps, bf16=True)
            return timer.trainer_times[-1]

        contenders = {"bare": bare, "trainer": trainer}
        measured.append({name: contenders[name]() for name in (contenders if number % 2 else reversed(contenders))})
    return measured[1:]


def alternate_steps(
    config: GPTConfig, loaders: list[TokenDataLoader], device: torch.device, steps: int, rounds: int
) -> Rounds:
    """For CPUs, whose speed drifts: alternate single steps; each round has a new pair of models.

    Memory placement alone changes the speed by 1-2%, also between two bare loops, hence the rounds.
    """
    measured = []
    for _ in range(rounds):
        timer = StepTimer(device, BareLoop(config, loaders[0], device, bf16=False))
        train(config, loaders[1], timer, steps, bf16=False)
        pairs = list(zip(timer.bare_times, timer.trainer_times, strict=False))[WARMUP_STEPS:]
        bare = statistics.median(bare for bare, _ in pairs)
        measured.append({"bare": bare, "trainer": bare + statistics.median(trainer - bare for bare, trainer in pairs)})
    return measured


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
    args = parser.parse_args()
    device = torch.device(args.device)
    results = {}
    for size in args.size or (["gpt2"] if device.type == "cuda" else ["tiny", "small"]):
        vocab = 50_257 if size == "gpt2" else 4096
        config = model_config(size, vocab)
        loaders = [
            TokenDataLoader(args.data, args.batch, config.context_length, device=device, vocab_size=vocab)
            for _ in range(2)
        ]
        if device.type == "cuda":
            rounds = alternate_runs(config, loaders, device, args.steps, args.rounds)
        else:
            rounds = alternate_steps(config, loaders, device, args.steps, args.rounds)
        ratio = statistics.median(times["trainer"] / times["bare"] for times in rounds)
        extra = statistics.median(times["trainer"] - times["bare"] for times in rounds)
        results[size] = {"ratio": ratio, "extra_microseconds": extra * 1e6, "rounds": rounds, "batch": args.batch}
        step = statistics.median(times["bare"] for times in rounds)
        print(f"{size:6} bare {step * 1e3:.2f} ms per step, trainer {ratio:.4f} x ({extra * 1e6:+.0f} us)")
    record("trainer", {"device": str(device), "threads": torch.get_num_threads(), **results}, args.out)


if __name__ == "__main__":
    main()
