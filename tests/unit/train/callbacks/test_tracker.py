"""Logging to Weights & Biases and trackio, offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from whimbrel.base.errors import MissingExtraError
from whimbrel.train.callbacks import TrackerCallback


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(MissingExtraError, match=rf"logging to {kind} needs the package '{kind}': pip install"):
        TrackerCallback(kind)


class Tracked:
    """A fake tracker run that records logged values."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        pass


def test_logs_are_reported_and_evaluations_only_once(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tracked = Tracked()
    module = SimpleNamespace(init=lambda **_: tracked)
    monkeypatch.setitem(sys.modules, "trackio", module)
    run = make_run(TrackerCallback("trackio")).begin()
    run.log({"eval_accuracy": torch.tensor(0.5), "text": "good", "path": Path("a")})
    run.evaluate(loss=0.25)
    run.end()
    assert tracked.logged == [
        {"log/eval_accuracy": 0.5, "log/text": "good", "log/path": "a"},
        {"eval/loss": 0.25},
    ]


SESSION = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from whimbrel.train.callbacks import TrackerCallback
from whimbrel.train.config import TrainConfig, TrainerConfig
from whimbrel.train.callback import TrainerState

kind, folder, first, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
callback = TrackerCallback(kind)
if (folder / "state.json").exists():
    callback.load_state_dict(json.loads((folder / "state.json").read_text()))
config = TrainerConfig(output_dir=folder / "run", train=TrainConfig(steps=9))
event = {"state": TrainerState(global_step=first, max_steps=9), "trainer": SimpleNamespace(config=config)}
(folder / "run").mkdir(exist_ok=True)
callback.on_train_begin(**event)
for step in range(first + 1, last + 1):
    metrics = {"step": step, "loss": 1 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens": 8, "seconds": 0.5}
    callback.on_train_metrics(**event, metrics=metrics)
callback.on_log(**event, logs={"eval_loss": 0.5}, kind="evaluation")
callback.on_evaluate(**event, metrics={"eval_loss": 0.5})
(folder / "state.json").write_text(json.dumps(callback.state_dict()))
callback.on_train_end(**event)
"""


def run_session(kind: str, folder: Path, first: int, last: int) -> str:
    """Train from `first` to `last` in a new process, offline; returns its output."""
    unset = {"WANDB_API_KEY", "WANDB_MODE", "HF_TOKEN"}
    own = {"TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1", "HOME": str(folder), "NETRC": "/dev/null"}
    environment = {key: value for key, value in os.environ.items() if key not in unset} | own
    command = [sys.executable, "-c", SESSION, kind, str(folder), str(first), str(last)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=folder, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_wandb_without_an_account_writes_to_the_run_directory_and_resumes_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_session("wandb", tmp_path, 0, 3)
    run_session("wandb", tmp_path, 2, 4)
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1  # the id


def test_trackio_resumes_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    run_session("trackio", tmp_path, 0, 3)
    run_session("trackio", tmp_path, 2, 4)
    code = "import trackio; (run,) = trackio.Api().runs('whimbrel'); print(run.name)"
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    state = json.loads((tmp_path / "state.json").read_text())
    assert done.stdout.split() == [f"run-{state['id']}"]
