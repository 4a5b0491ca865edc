"""Jobs for test_trainer_optim.py: training runs with the settings of a config file, on the ranks of a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from whimbrel.base.errors import WhimbrelError
from whimbrel.distributed.state import full_tensor, is_sharded
from whimbrel.train import Trainer
from whimbrel.train.config import build_run_config

MODEL = {"context_length": 32, "vocab_size": 300, "num_layers": 2, "embd_size": 64, "num_heads": 2}
TOKENS_PER_STEP = 512


class Run(NamedTuple):
    """What one rank knows after a run; the curve only on rank 0."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    state_bytes: int
    """Bytes of optimizer state on this rank."""


def config_table(folder: Path, ranks: int, changes: dict[str, Any]) -> dict[str, Any]:
    """A run of 12 steps with two micro-batches each, clipped at every step; `section.name` changes a setting."""
    table: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "model": dict(MODEL),
        "data": {"path": str(folder / "shards"), "shuffle_seed": 1, "documents": "mask"},
        "train": {
            "steps": 12, "tokens_per_step": TOKENS_PER_STEP, "micro_batch": 8 // ranks, "device": "cpu", "clip": 0.5,
        },
        "optim": {"lr": 1e-3},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "log": {"every": 1, "progress": False, "tensorboard": False},
        "validation": {"at_end": False},
        "checkpoint": {"at_end": False},
    }  # fmt: skip
    for key, value in changes.items():
        section, name = key.split(".")
        table.setdefault(section, {})[name] = value
    return table


def train(folder: Path, ranks: int, changes: dict[str, Any]) -> Run:
    trainer = Trainer.from_config(build_run_config(config_table(folder, ranks, changes)))
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.optimizer is not None
    state = [tensor for values in trainer.optimizer.state.values() for tensor in values.values()]
    weights = {
        name: full_tensor(parameter.detach()).clone()
        for name, parameter in trainer.unwrapped_model().named_parameters()
    }
    return Run(
        [entry["loss"] for entry in logs],
        [entry["grad_norm"] for entry in logs],
        weights,
        sum((tensor.to_local() if is_sharded(tensor) else tensor).nbytes for tensor in state),
    )


def error_of_run(folder: Path, ranks: int, changes: dict[str, Any]) -> str:
    """The error that a run raises, as `Type: message`, or "no error"."""
    try:
        train(folder, ranks, changes)
    except WhimbrelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
