"""Files that a killed process leaves behind, and how the next run handles them."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from whimbrel.base.errors import WriteError
from whimbrel.base.files import PARTIAL
from whimbrel.checkpoint import list_checkpoints, read_component
from whimbrel.train import RunConfig, Trainer, TrainerCallback, read_log, train
from whimbrel.train.checkpointing import GPTState

MakeRun = Callable[..., RunConfig]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run(config: RunConfig) -> None:
    train(config)


def test_interrupted_pruning_is_finished_by_the_next_run(make_run: MakeRun) -> None:
    config = make_run(checkpoint__every=1, checkpoint__keep=2)
    run(config)
    folder = config.output_dir / "checkpoints"
    expected = names(folder)
    assert expected == ["step-00000005", "step-00000006"]
    shutil.copytree(folder / "step-00000005", folder / "step-00000004")  # was to be removed
    shutil.copytree(folder / "step-00000005", folder / "step-00000003")  # was being removed
    (folder / "step-00000003" / "manifest.json").unlink()
    run(config)
    assert names(folder) == expected


def test_partial_files_are_removed(make_run: MakeRun) -> None:
    config = make_run()
    run(config)
    expected = names(config.output_dir)
    for name in (f"{PARTIAL}1-config.toml", f"{PARTIAL}1-log.jsonl", f"{PARTIAL}x7f2a"):
        (config.output_dir / name).write_text("half of i")
    (config.output_dir / "checkpoints" / f"{PARTIAL}1-step-00000004").mkdir()
    run(config)
    assert names(config.output_dir) == expected
    assert names(config.output_dir / "checkpoints") == ["step-00000006"]


def test_a_partial_ema_directory_is_written_again(make_run: MakeRun) -> None:
    config = make_run(ema__decay=0.9)
    run(config)
    folder = config.output_dir / "ema"
    weights = (folder / "step-00000006" / "model.safetensors").read_bytes()
    (folder / "step-00000006").rename(folder / f"{PARTIAL}1-step-00000006")
    run(config)
    assert names(folder) == ["step-00000006"]
    assert (folder / "step-00000006" / "model.safetensors").read_bytes() == weights


def test_a_new_model_directory_is_complete_or_absent(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer.from_config(make_run(), callbacks=[])
    save = GPTState.save_directory

    def fail_at_the_end(self: GPTState, state: dict[str, Tensor], folder: Path) -> None:
        save(self, state, folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(WriteError, match="No space left"):
        patch.setattr(GPTState, "save_directory", fail_at_the_end)
        trainer.save_model(tmp_path / "model")
    assert not list(tmp_path.glob("*model*"))
    trainer.save_model(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_the_best_checkpoint_is_recorded_in_itself(make_run: MakeRun) -> None:
    """A resumed run needs it to match an uninterrupted one."""
    config = make_run(validation__every=2, checkpoint__every=2)
    run(config)
    for step, path in list_checkpoints(config.output_dir).items():
        state = read_component(path, "trainer")
        assert (state["best_global_step"], state["best_model_checkpoint"]) == (step, str(path))


class Pause(TrainerCallback):
    """Requests a save and a stop after a step, as a signal does."""

    def __init__(self, step: int) -> None:
        self.step, self.is_draining = step, False

    def on_step_end(self, **event: Any) -> None:
        if event["state"].global_step == self.step:
            event["control"].should_save = event["control"].should_training_stop = self.is_draining = True


@pytest.mark.parametrize("step", [3, 4, 6])  # nothing else due, a save due, the last one
def test_an_interrupted_run_ends_like_an_uninterrupted_one(make_run: MakeRun, tmp_path: Path, step: int) -> None:
    settings = {"checkpoint__every": 4, "checkpoint__best": 1, "log__every": 5, "validation__every": 5}
    logs = []
    for name in ("uninterrupted", "paused"):
        config = make_run(output_dir=tmp_path / name, **settings)
        if name == "paused":
            train(config, callbacks=[Pause(step)])
            assert max(list_checkpoints(config.output_dir)) == step
        run(config)
        lines = read_log(config.output_dir / "log.jsonl")
        logs.append([{key: line.get(key) for key in ("kind", "after", "loss")} for line in lines])
    assert logs[0] == logs[1]
