"""The order of operations in an optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from whimbrel.train.build import create_optimizer
from whimbrel.train.device import Stopwatch
from whimbrel.train.initial_model import init_model
from whimbrel.train.memory import build_dry_run_step
from whimbrel.train.run_config import build_run_config


def test_metrics_are_copied_before_the_end_of_step_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers wait for the mark: a copy after it might not have arrived yet on a busy device."""
    order: list[str] = []

    class Watch(Stopwatch):
        def mark(self) -> Any:
            order.append("mark")
            return super().mark()

    def copy_to_host(loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        order.append("numbers")
        return torch.stack((loss, norm))

    monkeypatch.setattr("whimbrel.train.step._copy_to_host", copy_to_host)
    config = build_run_config(
        {
            "output_dir": str(tmp_path), "data": {"path": str(tmp_path)},
            "model": {"num_layers": 1, "embd_size": 32, "num_heads": 2, "vocab_size": 64, "context_length": 16},
            "train": {"steps": 2, "micro_batch": 1, "accumulation": 1},
        }
    )  # fmt: skip
    model, device = init_model(config), torch.device("cpu")
    loop = build_dry_run_step(config, model, device, create_optimizer(model, config, None))
    loop.stopwatch = Watch(device)
    loop.run(1)
    assert order == ["mark", "numbers", "mark"]
