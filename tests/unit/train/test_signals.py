"""SIGTERM and SIGINT: finish the step, save and stop; also during an evaluation, with any callbacks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whimbrel.checkpoint import list_checkpoints, read_component
from whimbrel.train import RunConfig, TrainerCallback, read_log, train
from whimbrel.train.control import SIGNALS, SignalHandler

Make = Callable[..., Any]
MakeRun = Callable[..., RunConfig]


class SignalAt:
    """Sends a signal to this process at an event of a step."""

    def __init__(self, step: int, event: str = "on_step_begin", number: signal.Signals = signal.SIGTERM) -> None:
        self.batches = 0
        self._step, self._number = step, number
        setattr(self, event, self._send)

    def _send(self, **event: Any) -> None:
        self.batches += 1
        if event["state"].global_step == self._step and signal.getsignal(self._number) != signal.SIG_DFL:
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_finishes_the_step_and_saves(
    args: Make, fit: Make, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="whimbrel")
    before = {number: signal.getsignal(number) for number in SIGNALS}
    settings = args()  # with save_strategy="no"
    trainer, losses = fit(settings, callbacks=[SignalAt(2, number=number)])
    assert trainer.state.global_step == len(losses.values) == 3
    assert list(list_checkpoints(Path(settings.output_dir))) == [3]
    assert trainer.received_signal == number
    assert trainer.stopped_by == (number.name, "on_step_end", "stop")
    again = {signal.SIGINT: "press Ctrl-C again", signal.SIGTERM: "send SIGTERM again"}[number]
    assert f"Interrupted ({number.name}): saving; {again} to quit without saving" in caplog.text
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_the_log_is_written_without_callbacks(args: Make, fit: Make) -> None:
    settings = args(max_steps=3)
    trainer, losses = fit(settings)
    for callback in list(trainer.callbacks):
        trainer.remove_callback(callback)
    lines = read_log(Path(settings.output_dir) / "log.jsonl")
    assert [line["loss"] for line in lines if line["kind"] == "step"] == losses.values


def test_a_signal_before_the_first_step_stops_the_run(args: Make, fit: Make) -> None:
    trainer, losses = fit(args(), callbacks=[SignalAt(0, "on_train_begin")])
    assert trainer.state.global_step == len(losses.values) == 0
    assert trainer.stopped_by == ("SIGTERM", "on_step_begin", "stop")


def test_signal_during_a_save_does_not_save_twice(args: Make, fit: Make) -> None:
    settings = args(save_strategy="steps", save_steps=2, async_save=False)
    trainer, _ = fit(settings, callbacks=[SignalAt(2, "on_save")])
    assert trainer.state.global_step == 2
    assert list(list_checkpoints(Path(settings.output_dir))) == [2]


@pytest.mark.parametrize("event", ["on_step_begin", "on_prediction_step"])
def test_signal_ends_an_evaluation_between_batches(args: Make, fit: Make, data: Make, event: str) -> None:
    evaluated = []

    class Evaluated(TrainerCallback):
        def on_evaluate(self, **event: Any) -> None:
            evaluated.append(event["state"].global_step)

    settings = args(eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=1)
    sender = SignalAt(3 if event == "on_prediction_step" else 2, event)
    trainer, _ = fit(settings, callbacks=[sender, Evaluated()], eval_dataset=data(20))
    assert trainer.state.global_step == 3
    assert evaluated == []
    assert sender.batches <= 3  # one batch of twenty, or the three steps
    assert trainer.model is not None
    assert trainer.model.training
    assert list(list_checkpoints(Path(settings.output_dir))) == [3]


def test_a_signal_does_not_stop_a_direct_evaluate_call(args: Make, fit: Make, data: Make) -> None:
    """A callback that evaluates gets its metrics; the run stops after that."""
    found = []

    class Own(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            found.append(event["trainer"].evaluate(data(4))["eval_loss"])

    trainer, _ = fit(args(), callbacks=[SignalAt(1), Own()])
    assert len(found) == trainer.state.global_step == 2


@pytest.mark.parametrize("step", [3, 5, 6])  # an evaluation due, a save and its evaluation due, the last step
def test_the_resumed_run_repeats_an_interrupted_evaluation(make_run: MakeRun, tmp_path: Path, step: int) -> None:
    settings = {
        "validation__every": 3, "validation__micro_batch": 1, "checkpoint__every": 5, "checkpoint__best": 1,
        "checkpoint__keep": 1, "log__every": 2,
    }  # fmt: skip

    class UsesRNG(TrainerCallback):  # as DataLoader workers do when they start
        def on_prediction_step(self, **event: Any) -> None:
            random.random()

    found = []
    for name in ("uninterrupted", "interrupted"):
        config = make_run(output_dir=tmp_path / name, **settings)
        if name == "interrupted":
            train(config, callbacks=[UsesRNG(), SignalAt(step, "on_prediction_step")])
            assert max(list_checkpoints(config.output_dir)) == step
            lines = read_log(config.output_dir / "log.jsonl")
            assert not any(line["kind"] == "validation" and line["after"] == step for line in lines)
        train(config, callbacks=[UsesRNG()])
        lines = read_log(config.output_dir / "log.jsonl")
        last = list_checkpoints(config.output_dir)[6]
        state = read_component(last, "trainer")
        best = {key: value for key, value in state.items() if key.startswith("best_") and "checkpoint" not in key}
        kept = list(list_checkpoints(config.output_dir))
        words = read_component(last, "rng.rank-00000")["python"]["words"].tolist()
        found.append(([(line["kind"], line["after"], line.get("loss")) for line in lines], best, kept, words))
    assert found[0] == found[1]


def test_handlers_are_restored_when_a_run_fails(args: Make, fit: Make) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    class Fails(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            seen.append(signal.getsignal(signal.SIGINT))
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fit(args(), callbacks=[Fails()])
    assert seen != [before]
    assert signal.getsignal(signal.SIGINT) == before


def test_a_run_in_another_thread_installs_no_handlers(args: Make, fit: Make) -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    class Look(TrainerCallback):
        def on_step_end(self, **event: Any) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=lambda: fit(args(max_steps=1), callbacks=[Look()]))
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_second_signal_kills_the_process() -> None:
    code = """
import os, signal
from whimbrel.train.control import SignalHandler
with SignalHandler() as handler:
    os.kill(os.getpid(), signal.SIGINT)
    print(handler.received.name, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "SIGINT\n"), done.stderr


def test_the_handler_is_reset_for_the_next_run() -> None:
    handler = SignalHandler()
    with handler:
        os.kill(os.getpid(), signal.SIGTERM)
    assert handler.received == signal.SIGTERM
    with handler:
        assert handler.received is None
