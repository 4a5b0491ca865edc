"""Checkpoints of a trainer, and bit-identical resume from them."""

from __future__ import annotations

import random
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.callbacks import InterruptAt
from torch import Tensor, nn

from whimbrel.base.errors import CheckpointError, ConfigError
from whimbrel.checkpoint import SharingPattern, list_checkpoints
from whimbrel.tokenization import load_tokenizer
from whimbrel.train import BaseTrainer, TrainingArguments

Make = Callable[..., Any]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_is_bit_identical_with_dropout_and_epochs(
    args: Make, fit: Make, net: Make, data: Make, tmp_path: Path, workers: int
) -> None:
    """Interrupted twice within an epoch; losses, weights, moments, log and RNG states are equal."""

    def settings(name: str, **changes: Any) -> TrainingArguments:
        return args(
            output_dir=str(tmp_path / name), max_steps=-1, num_train_epochs=3, gradient_accumulation_steps=2,
            save_strategy="steps", save_steps=2, lr_scheduler_type="cosine", warmup_steps=2, logging_steps=3,
            eval_strategy="steps", eval_steps=3, dataloader_num_workers=workers, seed=5, **changes,
        )  # fmt: skip

    uninterrupted, reference = fit(settings("uninterrupted"), net(0.3), train_dataset=data(22), eval_dataset=data(6))
    drawn = (random.random(), np.random.rand(), torch.rand(1))
    for at in (3, 7):
        with pytest.raises(KeyboardInterrupt):
            fit(
                settings("interrupted"), net(0.3), train_dataset=data(22), eval_dataset=data(6),
                callbacks=[InterruptAt(at)], resume=True,
            )  # fmt: skip
    random.seed(99)
    torch.manual_seed(99)
    interrupted, last = fit(
        settings("interrupted"), net(0.3), train_dataset=data(22), eval_dataset=data(6), resume=True
    )
    assert last.hex == reference.hex[6:]
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn
    for a, b in zip(
        uninterrupted.unwrapped_model().parameters(), interrupted.unwrapped_model().parameters(), strict=True
    ):
        assert torch.equal(a, b)
    assert uninterrupted.optimizer is not None
    assert interrupted.optimizer is not None
    theirs = interrupted.optimizer.state_dict()["state"]
    for index, state in uninterrupted.optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, theirs[index][name]) for name, tensor in state.items())
    assert interrupted.state.log_history == uninterrupted.state.log_history
    assert interrupted.state.total_flos == uninterrupted.state.total_flos


def test_run_without_its_directory_resumes_from_the_mirror(args: Make, fit: Make, tmp_path: Path) -> None:
    run, mirror = tmp_path / "run", f"file://{tmp_path}/mirror"
    settings = {"save_strategy": "steps", "save_steps": 2, "save_mirror": mirror, "output_dir": str(run)}
    _, reference = fit(args(**settings | {"save_mirror": None, "output_dir": str(tmp_path / "reference")}))
    with pytest.raises(KeyboardInterrupt):
        fit(args(**settings), callbacks=[InterruptAt(5)])
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match="already contains a run at step 4"):
        fit(args(**settings))
    again, losses = fit(args(**settings), resume=True)
    assert again.resumed_from == run / "checkpoints/step-00000004"
    assert losses.hex == reference.hex[4:]
    assert sorted(path.name for path in (tmp_path / "mirror").iterdir())[-1] == "step-00000008"


def test_resume_takes_true_latest_or_a_path(args: Make, fit: Make, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    _, reference = fit(args(**settings, output_dir=str(tmp_path / "run")))
    for resume, first in ((True, 8), ("latest", 8), (str(tmp_path / "run/checkpoints/step-00000004"), 4)):
        again, losses = fit(args(**settings, output_dir=str(tmp_path / "run")), resume=resume)
        assert again.resumed_from is not None
        assert again.resumed_from.name == f"step-{first:08d}"
        assert losses.hex[: 8 - first] == reference.hex[first:]
    with pytest.raises(ConfigError, match="already contains a run at step 8"):
        fit(args(**settings, output_dir=str(tmp_path / "run")))
    _, losses = fit(args(**settings, output_dir=str(tmp_path / "run"), overwrite_output_dir=True))
    assert losses.hex == reference.hex
    with pytest.raises(CheckpointError, match="no valid checkpoint|cannot be read"):
        fit(args(output_dir=str(tmp_path / "none")), resume=str(tmp_path / "none" / "checkpoints"))


def test_a_component_can_be_skipped(args: Make, fit: Make, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    fit(args(**settings))
    folder = Path(args().output_dir or "") / "checkpoints" / "step-00000004"
    for path in folder.glob("optimizer.*"):
        path.unlink()
    again, _ = fit(args(**settings | {"max_steps": 5}), resume=True)
    assert "has no 'optimizer'" in caplog.text
    assert again.optimizer is not None
    assert {int(state["step"]) for state in again.optimizer.state.values()} == {1}
    (folder / "model" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        fit(args(**settings), resume=str(folder))


def test_checkpoint_components_of_one_device(args: Make, fit: Make) -> None:
    trainer, _ = fit(args(max_steps=1))
    parts = trainer.get_state_components()
    assert [part.key for part in parts] == ["model", "optimizer", "scheduler", "trainer", "dataset", "rng", "callbacks"]
    assert {part.key for part in parts if part.sharing_pattern is not SharingPattern.GLOBAL} == {"rng"}
    assert {part.key for part in parts if part.required} == {"model", "trainer"}
    assert trainer.get_process_groups() == {}
    state = trainer.state_dict()
    assert {"global_step", "epoch_start_step", "raw_epoch", "num_input_tokens_seen", "total_flos"} <= set(state)
    trainer.load_state_dict({
        "global_step": 5, "epoch_start_step": 4, "raw_epoch": 2, "num_input_tokens_seen": 9, "total_flos": 1.0
    })  # fmt: skip
    assert (trainer.state.global_step, trainer.state.raw_epoch) == (5, 2)


def test_the_best_checkpoint_is_kept_and_reported(args: Make, net: Make, data: Make) -> None:
    values = iter([0.5, 0.0, 0.7, 0.3])

    class Scripted(BaseTrainer):
        def _eval_loop(self) -> dict[str, float]:
            return {"eval_loss": next(values)}

    settings = args(
        save_strategy="steps", save_steps=2, save_total_limit=1, preserve_best_model=True, eval_on_save=True
    )
    trainer = Scripted(settings, net(), train_dataset=data(), eval_dataset=data(4), callbacks=[])
    trainer.train()
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [4, 8]
    assert trainer.state.best_metric == 0.0
    assert (trainer.state.best_model_checkpoint or "").endswith("step-00000004")


def test_save_model_writes_only_weights_and_does_not_replace_files(args: Make, fit: Make, tmp_path: Path) -> None:
    trainer, _ = fit(args(max_steps=1))
    trainer.save_model(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    with pytest.raises(ConfigError, match="already contains a model"):
        trainer.save_model(tmp_path / "out")
    trainer.save_model()
    assert (trainer.config.output_dir / "model.safetensors").exists()


def test_an_explicit_resume_takes_precedence_over_overwrite(args: Make, fit: Make) -> None:
    settings = {"save_strategy": "steps", "save_steps": 4, "overwrite_output_dir": True}
    fit(args(**settings))
    again, losses = fit(args(**settings, max_steps=10), resume=True)
    assert again.resumed_from is not None
    assert len(losses.values) == 2
    again.train()  # an explicit resume applies to one call
    assert len(losses.values) == 12


def test_overwrite_removes_only_files_of_the_run(args: Make, fit: Make) -> None:
    run = Path(args().output_dir)
    kept = [run / "runs" / "2024_my_results" / "thesis.txt", run / "checkpoints" / "notes.txt", run / "mine.txt"]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    fit(args(save_strategy="steps", save_steps=4))
    events = run / "runs" / "1700000000000000000_host"
    events.mkdir()
    (events / "events.out.tfevents.1").write_text("")
    fit(args(save_strategy="steps", save_steps=8, overwrite_output_dir=True))
    assert all(path.exists() for path in kept)
    assert not events.exists()
    assert list(list_checkpoints(run)) == [8]


def test_settings_are_recorded_and_changes_are_logged(args: Make, fit: Make, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"save_strategy": "steps", "save_steps": 4}
    fit(args(**settings))
    recorded = Path(args().output_dir) / "config.toml"
    table = tomllib.loads(recorded.read_text())
    assert table["optim"]["lr"] == 0.05
    assert "resume" not in table
    fit(args(**settings, max_steps=10, learning_rate=0.01), resume=True)
    assert "optim.lr was 0.05, now 0.01" in caplog.text
    assert tomllib.loads(recorded.read_text())["optim"]["lr"] == 0.01


def test_tensorboard_events_continue_in_their_folder(args: Make, fit: Make, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 4}
    fit(args(**settings, logging_dir=str(tmp_path / "events")))
    again, _ = fit(args(**settings, max_steps=10), resume=True)
    assert again.args.logging_dir == str(tmp_path / "events")


def test_weight_decay_can_be_enabled_in_a_resumed_run(args: Make, fit: Make) -> None:
    settings = {"save_strategy": "steps", "save_steps": 8}
    fit(args(**settings))
    again, _ = fit(args(**settings, max_steps=9, weight_decay=0.1), resume=True)
    assert again.optimizer is not None
    assert sorted(group["weight_decay"] for group in again.optimizer.param_groups) == [0.0, 0.1]
    assert {int(state["step"]) for state in again.optimizer.state.values()} == {9}


def test_log_history_is_one_string_in_a_checkpoint(args: Make, fit: Make) -> None:
    trainer, _ = fit(args(logging_steps=1))
    state = trainer.state_dict()
    assert len(state["log_history"].splitlines()) == 8
    history = [dict(entry) for entry in trainer.state.log_history]
    trainer.state.log_history = []
    trainer.load_state_dict(state)
    assert trainer.state.log_history == history


def test_the_processing_class_is_saved_with_any_model(args: Make, fit: Make, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("gpt2")
    trainer, _ = fit(args(), processing_class=tokenizer)
    trainer.save_model(tmp_path / "model")
    assert load_tokenizer(tmp_path / "model").fingerprint == tokenizer.fingerprint
    with pytest.raises(ConfigError, match="processing_class, got dict"):
        fit(args(), processing_class={})


def test_resuming_without_a_checkpoint_is_logged(args: Make, fit: Make, caplog: pytest.LogCaptureFixture) -> None:
    fit(args(), resume=True)
    assert "starting a new run" in caplog.text


def test_a_module_with_save_pretrained_but_no_config_resumes(args: Make, data: Make, tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "own.json").write_text("{}")

    ends = []
    for name, stops in (("uninterrupted", (4,)), ("interrupted", (2, 4))):
        for stop in stops:
            torch.manual_seed(0)
            settings = args(
                output_dir=str(tmp_path / name), max_steps=stop, save_strategy="steps", save_steps=2, async_save=True
            )
            trainer = BaseTrainer(settings, Own(), train_dataset=data(), callbacks=[])
            trainer.train(resume_from_checkpoint=True)
        ends.append(trainer.unwrapped_model().state_dict())
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    assert (tmp_path / "uninterrupted/checkpoints/step-00000004/model/own.json").is_file()
