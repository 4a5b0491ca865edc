"""Token shards of a small corpus, a run on them that takes a second, and a small classifier with data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.runs import prepare_text
from torch import Tensor, nn

from whimbrel.train import BaseTrainer, RunConfig, TrainerCallback, TrainingArguments
from whimbrel.train.run_config import build_run_config

MakeRun = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    """About 20,000 tokens of Shakespeare with a vocabulary of 300; every speech is a document."""
    folder = tmp_path_factory.mktemp("shards")
    prepare_text(folder, shakespeare[:40_000])
    return folder / "shards"


@pytest.fixture
def make_run(shards: Path, tmp_path: Path) -> MakeRun:
    """A `RunConfig` with a tiny model; `section__name=value` changes a setting."""

    def make(**changes: object) -> RunConfig:
        table: dict[str, dict[str, object]] = {
            "model": {"context_length": 32, "vocab_size": 300, "num_layers": 2, "embd_size": 32, "num_heads": 2},
            "data": {"path": str(shards), "shuffle_seed": 1},
            "train": {"steps": 6, "tokens_per_step": 256, "micro_batch": 4, "device": "cpu"},
            "optim": {"lr": 1e-3},
            "schedule": {"name": "cosine", "warmup_steps": 2},
        }
        output_dir = changes.pop("output_dir", tmp_path / "run")
        for key, value in changes.items():
            section, name = key.split("__")
            table.setdefault(section, {})[name] = value
        return build_run_config({"output_dir": str(output_dir), **table})

    return make


class Net(nn.Module):
    """A small classifier, optionally with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layers(x)
        return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


class Losses(TrainerCallback):
    """Records the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    @property
    def hex(self) -> list[str]:
        return [value.hex() for value in self.values]

    def on_train_metrics(self, **event: Any) -> None:
        self.values.append(event["metrics"]["loss"])


@pytest.fixture
def net() -> Callable[..., nn.Module]:
    """Creates the classifier, always with the same weights."""

    def make(dropout: float = 0.0) -> nn.Module:
        torch.manual_seed(0)
        return Net(dropout)

    return make


@pytest.fixture
def data() -> Callable[..., list[dict[str, Any]]]:
    """Creates examples for the classifier, always the same."""

    def make(count: int = 24) -> list[dict[str, Any]]:
        rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(3))
        return [{"x": row, "labels": int(row.sum() > 0) + int(row[0] > 1)} for row in rows]

    return make


@pytest.fixture
def args(tmp_path: Path) -> Callable[..., TrainingArguments]:
    """Arguments of a run of eight steps that saves nothing."""

    def make(**changes: Any) -> TrainingArguments:
        settings = {
            "output_dir": str(tmp_path / "run"), "max_steps": 8, "per_device_train_batch_size": 4,
            "learning_rate": 0.05, "use_cpu": True, "logging_steps": 2, "save_strategy": "no",
            "lr_scheduler_type": "constant",
        }  # fmt: skip
        return TrainingArguments(**settings | changes)

    return make


@pytest.fixture
def fit(net: Callable[..., nn.Module], data: Callable[..., Any]) -> Callable[..., tuple[BaseTrainer, Losses]]:
    """Trains the classifier, or another model; returns the trainer and the losses."""

    def run(args: TrainingArguments, model: nn.Module | None = None, **keywords: Any) -> tuple[BaseTrainer, Losses]:
        losses, resume = Losses(), keywords.pop("resume", None)
        keywords = {"train_dataset": data(), **keywords, "callbacks": [losses, *keywords.get("callbacks", ())]}
        trainer = BaseTrainer(args, model or net(), **keywords)
        trainer.train(resume)
        return trainer, losses

    return run
