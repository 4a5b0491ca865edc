"""Jobs for test_launch.py: trainers on several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.distributed.trainer_jobs import LENGTH, VOCAB, make_model

from whimbrel.base.errors import WhimbrelError
from whimbrel.distributed import ParallelConfig, join_world
from whimbrel.distributed.failure import meet
from whimbrel.train import TrainerCallback, TrainingArguments, strategies, trainer

CLASSES = {
    cls.__name__: cls
    for cls in (trainer.Trainer, strategies.DDPTrainer, strategies.FSDPTrainer, strategies.AccelTrainer,
                strategies.PipelineTrainer)
}  # fmt: skip


class Events(TrainerCallback):
    def __init__(self, *, all_ranks: bool) -> None:
        self.all_ranks, self.steps = all_ranks, 0

    def on_step_end(self, **event: Any) -> None:
        self.steps += 1
        event["control"].should_training_stop |= event["state"].global_step == 5 and not self.all_ranks


class FlagSetter(TrainerCallback):
    """Requests evaluations in events that only rank 0 sees."""

    def on_log(self, **event: Any) -> None:
        event["control"].should_evaluate |= event["state"].global_step == 2

    def on_epoch_end(self, **event: Any) -> None:
        event["control"].should_evaluate = True

    def on_train_metrics(self, **event: Any) -> None:
        event["control"].should_save |= event["metrics"]["step"] == 3


def train_with_flags(folder: str) -> list[int]:
    """The steps after which the model was evaluated, and saved, as a callback of rank 0 requested."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, VOCAB, (LENGTH,), generator=generator) for _ in range(64)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        output_dir=folder, max_steps=5, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
        eval_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    ours = trainer.Trainer(
        args, make_model("gpt2"), train_dataset=data, eval_dataset=data[:4], callbacks=[FlagSetter()]
    )
    ours.train()
    return [entry["step"] for entry in ours.state.log_history if "eval_loss" in entry]


def group_timeouts(sizes: dict[str, int]) -> dict[str, float]:
    """The timeout in seconds of each process group of a mesh."""
    world = join_world(ParallelConfig(**sizes, timeout=20.0), "cpu")
    found = {}
    for name, group in world.groups().items():
        found[name] = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return found


def train_with_accelerate(folder: str, parallel: dict[str, Any] | None = None) -> dict[str, Any]:
    """As `train`, in the environment that torchrun sets: Accelerate reads it."""
    from accelerate.state import AcceleratorState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    try:
        with mock.patch.dict(os.environ, variables):
            return train("AccelTrainer", folder, parallel)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def train(name: str, folder: str, parallel: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train a GPT on the ranks of the process group; a callback of rank 0 stops the run after 5 of 8 steps."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, VOCAB, (LENGTH,), generator=generator) for _ in range(64)]
    args = TrainingArguments(
        output_dir=folder, max_steps=8, per_device_train_batch_size=8 // ranks, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", use_cpu=True, disable_tqdm=True, parallel=parallel,
    )  # fmt: skip
    if name == "PipelineTrainer":
        args.per_device_train_batch_size, args.gradient_accumulation_steps = 4, 2
    everywhere, main = Events(all_ranks=True), Events(all_ranks=False)
    try:
        ours = CLASSES[name](
            args, make_model("gpt2"), train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[everywhere, main],
        )  # fmt: skip
        ours.train()
    except WhimbrelError as error:
        return {"error": str(error)}
    return {
        "losses": [entry["loss"] for entry in ours.state.log_history if "loss" in entry],
        "wrapper": type(ours.model).__name__,
        "sharded": any(hasattr(p, "placements") for p in ours.model.parameters()),
        "steps": (ours.state.global_step, everywhere.steps, main.steps),
        "process": (ours.num_processes, ours.process_index, bool(ours.is_world_process_zero())),
        "gathered": ours.accelerator.gather(torch.tensor(ours.args.process_index)).tolist(),
    }


def meet_twice(store_path: str) -> list[str]:
    """Ranks that are started twice with the same store get two names, and agree on each."""
    store, rank, size = dist.FileStore(store_path), dist.get_rank(), dist.get_world_size()
    names = []
    for _ in range(2):
        names.append(meet(store, rank, size, 30.0))
        dist.barrier()
    return names


def order_of_main_process_first(folder: str) -> bool:
    """Whether the first process has finished the block when this one starts it."""
    args, file = TrainingArguments(use_cpu=True), Path(folder) / "done"
    with args.main_process_first(local=False):
        done = file.exists()
        file.touch()
    return done
