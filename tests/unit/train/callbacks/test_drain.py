"""Signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from whimbrel.train.callbacks import DrainOnSignal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_with_a_save(make_run: Any, number: signal.Signals) -> None:
    before = {own: signal.getsignal(own) for own in (signal.SIGTERM, signal.SIGINT)}
    callback = DrainOnSignal()
    run = make_run(callback).begin()
    run.step()
    assert not run.control.ends_training
    os.kill(os.getpid(), number)
    assert not run.control.ends_training  # in the middle of a step nothing happens
    assert signal.getsignal(number) == signal.SIG_DFL  # a second one kills
    run.step()
    assert run.control.should_training_stop
    assert run.control.should_save
    assert not run.control.should_abort_without_save
    assert callback.drains
    assert callback.reason == number.name
    assert run.callbacks.stopped_by == ("DrainOnSignal", "on_step_end", "stop")
    run.end()
    assert {own: signal.getsignal(own) for own in before} == before


@pytest.mark.parametrize("during", ["evaluation", "save"])
def test_a_signal_between_steps_is_heard_too(make_run: Any, during: str) -> None:
    run = make_run(DrainOnSignal()).begin()
    run.step()
    os.kill(os.getpid(), signal.SIGTERM)
    if during == "save":
        run.save()
        assert not run.control.should_save  # that save holds this step
    else:
        run.evaluate(loss=1.0)
        assert run.control.should_save
    assert run.control.should_training_stop
    run.end()


def test_a_save_of_an_earlier_step_is_not_enough(make_run: Any) -> None:
    run = make_run(DrainOnSignal()).begin()
    run.step()
    run.step()
    os.kill(os.getpid(), signal.SIGTERM)
    run.tell("on_save", checkpoint=None, step=1)
    assert run.control.should_save
    run.end()


def test_handlers_are_put_back_when_a_run_fails(make_run: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    run = make_run(DrainOnSignal()).begin()
    assert signal.getsignal(signal.SIGINT) != before
    run.fail()
    assert signal.getsignal(signal.SIGINT) == before


def test_a_run_in_another_thread_goes_without(make_run: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ended = []

    def train() -> None:
        run = make_run(DrainOnSignal()).begin()
        run.step()
        ended.append(signal.getsignal(signal.SIGTERM))
        run.end()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert ended == [before]


def test_a_second_signal_kills_at_once() -> None:
    code = """
import os, signal
from whimbrel.train.callbacks import DrainOnSignal
drain = DrainOnSignal()
drain.on_train_begin()
os.kill(os.getpid(), signal.SIGINT)
print(drain.signal.name, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("still here", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "SIGINT\n"), done.stderr
