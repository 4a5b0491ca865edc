"""A run directory is locked by one run at a time, with any callbacks, from Python or the command line."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import wait_until

from whimbrel.base.errors import ConfigError
from whimbrel.base.lock import DirectoryLock, lock_owner
from whimbrel.checkpoint import CheckpointManager, list_checkpoints
from whimbrel.config import dump_toml, to_table
from whimbrel.train import RunConfig, Trainer, TrainerCallback, train

Make = Callable[..., Any]
MakeRun = Callable[..., RunConfig]

FIRST = """
import sys, time
from pathlib import Path
import torch
from whimbrel.train import Trainer, TrainerCallback, TrainingArguments

class Wait(TrainerCallback):
    def on_step_end(self, **event):
        while event["state"].global_step == 3 and not Path(sys.argv[2]).exists():
            time.sleep(0.01)

class Net(torch.nn.Linear):
    def forward(self, x, labels=None):
        return super().forward(x)

rows = [{"x": torch.full((4,), float(n)), "labels": n % 3} for n in range(8)]
args = TrainingArguments(output_dir=sys.argv[1], max_steps=5, save_steps=1, async_save=False, use_cpu=True)
trainer = Trainer(args, Net(4, 3), train_dataset=rows, callbacks=[Wait()])
for callback in list(trainer.callbacks):
    if not isinstance(callback, Wait):
        trainer.remove_callback(callback)
trainer.train()
"""


def contents(run: Path) -> dict[str, bytes]:
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def test_a_second_run_raises_and_changes_nothing(
    tmp_path: Path, args: Make, net: Make, data: Make, make_run: MakeRun
) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    first = subprocess.Popen([sys.executable, "-c", FIRST, str(run), str(go)])
    with first, contextlib.ExitStack() as stack:
        stack.callback(go.touch)  # also if an assertion fails
        wait_until(first, lambda: 2 in list_checkpoints(run))
        time.sleep(0.2)  # the third step
        before = contents(run)
        message = re.escape(f"{run} is in use by process {first.pid} on {socket.gethostname()}")
        for settings in ({"overwrite_output_dir": True}, {"resume_from_checkpoint": True}, {}):
            for callbacks in (None, [TrainerCallback()]):
                second = Trainer(args(**settings), net(), train_dataset=data(), callbacks=callbacks)
                with pytest.raises(ConfigError, match=message):
                    second.train()
        with pytest.raises(ConfigError, match=message):
            train(make_run(), callbacks=[TrainerCallback()])
        with pytest.raises(ConfigError, match=message):
            CheckpointManager(run, keep=1).clean_up(2)
        with pytest.raises(ConfigError, match=message):
            Trainer(args(), net(), train_dataset=data()).save_checkpoint()
        assert contents(run) == before
    assert first.returncode == 0
    assert list(list_checkpoints(run)) == [1, 2, 3, 4, 5]
    assert lock_owner(run) is None


def test_the_command_line_fails_while_a_library_run_has_the_lock(make_run: MakeRun, tmp_path: Path) -> None:
    config = make_run(checkpoint__every=1, checkpoint__asynchronous=False)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_toml(to_table(config)))
    refused = []

    class Second(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            if event["state"].global_step == 2:
                before = contents(config.output_dir)
                for more in ("--optim.lr=0.1", "--overwrite_output_dir=true"):
                    words = [sys.executable, "-m", "whimbrel", "train", str(recipe), more]
                    refused.append(subprocess.run(words, capture_output=True, text=True, check=False))
                assert contents(config.output_dir) == before

    train(config, callbacks=[Second()])
    assert [done.returncode for done in refused] == [2, 2]
    for done in refused:
        (line,) = done.stderr.splitlines()
        assert f"{config.output_dir} is in use by process {os.getpid()} on {socket.gethostname()}" in line
        assert done.stdout == ""
    assert list(list_checkpoints(config.output_dir)) == [1, 2, 3, 4, 5, 6]


def test_the_lock_is_released_after_a_failed_run(args: Make, fit: Make) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fit(args(), callbacks=[Fails()])
    fit(args(max_steps=1))


def test_a_save_outside_a_run_locks_until_it_is_written(args: Make, fit: Make) -> None:
    trainer, _ = fit(args(max_steps=1))
    trainer.save_checkpoint()
    trainer.checkpoint_manager.wait()
    with DirectoryLock(trainer.config.output_dir):
        pass
    assert list(list_checkpoints(Path(trainer.config.output_dir))) == [1]


def test_a_run_that_changed_the_directory_before_the_lock_is_detected(make_run: MakeRun) -> None:
    """Both chose their micro-batch before there was a checkpoint with one."""
    late = Trainer.from_config(make_run(train__micro_batch=None, checkpoint__at_end=True))
    assert late.config.train.micro_batch != 4
    train(make_run(train__micro_batch=4))
    with pytest.raises(ConfigError, match="changed while this run was starting"):
        late.train()


def test_two_runs_cannot_share_a_directory(args: Make, fit: Make) -> None:
    class Second(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            with pytest.raises(ConfigError, match="is in use by process .* choose another output_dir"):
                fit(args(overwrite_output_dir=True))

    settings = args(max_steps=1, save_strategy="steps", save_steps=1)
    fit(settings, callbacks=[Second()])
    assert list(list_checkpoints(Path(settings.output_dir or ""))) == [1]
