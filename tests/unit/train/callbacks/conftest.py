"""A minimal trainer: a real model, real steps and the real dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from whimbrel.distributed import World
from whimbrel.train.callback import Callbacks, TrainerControl, TrainerState, TrainOutput
from whimbrel.train.callbacks.progress import RunSummary, estimate_memory
from whimbrel.train.config import LogConfig, TrainConfig, TrainerConfig


class Run:
    """Trains a linear map; `step` runs one step, or only reports `loss` if it is passed."""

    def __init__(self, output_dir: Path, callbacks: Iterable[object], steps: int = 10, log: LogConfig | None = None):
        self.config = TrainerConfig(output_dir=output_dir, train=TrainConfig(steps=steps), log=log or LogConfig())
        self.args = SimpleNamespace(logging_dir=str(output_dir / "runs" / "1_host"))
        self.device, self.world = torch.device("cpu"), World()
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.state = TrainerState(max_steps=steps)
        self.control = TrainerControl()
        self.callbacks = Callbacks(callbacks)
        self.checkpoint: Path | None = None
        self.saved_models: dict[Path, dict[str, torch.Tensor]] = {}

    def dispatch(self, event: str, **keywords: Any) -> TrainerControl:
        self.control = self.callbacks.dispatch(
            event, self.control, args=self.args, state=self.state, model=self.model, processing_class=None,
            optimizer=self.optimizer, lr_scheduler=None, train_dataloader=None, eval_dataloader=None, trainer=self,
            **keywords,
        )  # fmt: skip
        return self.control

    def log(self, logs: dict[str, Any], kind: str = "metrics") -> TrainerControl:
        self.state.log_history.append(logs)
        return self.dispatch("on_log", logs=logs, kind=kind)

    def flush_metrics(self) -> None:
        """Metrics are dispatched at once here."""

    def save_model(self, path: Path) -> None:
        self.saved_models[path] = {name: value.clone() for name, value in self.model.state_dict().items()}
        path.mkdir(parents=True)

    def begin(self, first_step: int = 0, **summary: Any) -> Run:
        self.state.global_step = first_step
        known = {
            "device": "cpu", "device_name": "cpu", "parameters": 49, "frozen_parameters": 0, "accumulation": 2,
            "memory": estimate_memory(self.model, self.optimizer), "samples_per_step": 32, "tokens_per_step": 256,
            "tokens_per_micro_batch": 128, "total_steps": self.state.max_steps, "first_step": first_step,
        }  # fmt: skip
        self.dispatch("on_train_begin", summary=RunSummary(**{**known, **summary}))
        return self

    def step(self, loss: float | None = None, **metrics: Any) -> float:
        self.dispatch("on_step_begin")
        if loss is None:
            x = torch.randn(16, 4)
            error = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            error.backward()
            loss = error.item()
        self.dispatch("on_pre_optimizer_step")
        self.optimizer.step()
        self.dispatch("on_optimizer_step")
        self.optimizer.zero_grad()
        self.state.global_step += 1
        self.state.num_input_tokens_seen += 256
        self.dispatch("on_step_end")
        numbers = {"loss": loss, "grad_norm": 0.5, "lr": 1e-3, "tokens": 256, "seconds": 0.5, "skipped": False}
        self.dispatch("on_train_metrics", metrics={"step": self.state.global_step, **numbers, **metrics})
        return loss

    def evaluate(self, **metrics: float) -> None:
        named = {f"eval_{name}": value for name, value in metrics.items()}
        self.log(named, kind="evaluation")
        self.dispatch("on_evaluate", metrics=named)

    def save(self) -> dict[str, Any]:
        self.checkpoint = self.config.output_dir / "checkpoints" / f"step-{self.state.global_step:08d}"
        self.dispatch("on_save", checkpoint=self.checkpoint, step=self.state.global_step)
        return self.callbacks.state_dict()

    def end(self) -> TrainOutput:
        metrics = {
            "train_seconds": 0.5 * self.state.global_step, "compile_seconds": 0.0, "peak_memory": 2**30,
            "num_input_tokens_seen": self.state.num_input_tokens_seen,
        }  # fmt: skip
        output = TrainOutput(self.state.global_step, 1.0, metrics)
        self.dispatch("on_train_end", output=output, checkpoint=self.checkpoint, stopped_by=self.callbacks.stopped_by)
        return output

    def fail(self) -> None:
        self.dispatch("on_train_end", output=None, checkpoint=None, stopped_by=None)


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run with the given callbacks in `tmp_path / "run"`."""

    def make(*callbacks: object, **settings: Any) -> Run:
        return Run(tmp_path / "run", callbacks, **settings)

    return make
