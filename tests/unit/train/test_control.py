"""A running job listens, obeys those who know its token, and is not hurt by anyone else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whimbrel.base.errors import RequestError
from whimbrel.train.callback import Callbacks
from whimbrel.train.control import LONGEST, MAX_CLIENTS, VERBS, ControlCallback, Endpoint, ask, liveness
from whimbrel.train.state import TrainerControl, TrainerState


class Run:
    """A job that does steps when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.callback = ControlCallback()
        self.callbacks = Callbacks([self.callback])
        self.control = TrainerControl()
        self.state = TrainerState(max_steps=100)
        self.trainer = SimpleNamespace(config=SimpleNamespace(output_dir=folder))

    def tell(self, event: str, **own: Any) -> None:
        self.control = self.callbacks.dispatch(event, self.control, state=self.state, trainer=self.trainer, **own)

    def step(self) -> None:
        self.state.global_step += 1
        self.tell("on_step_end")
        step = self.state.global_step
        metrics = {"step": step, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "tokens": 512, "seconds": 0.5}
        self.tell("on_train_metrics", metrics=metrics)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    own = Run(tmp_path / "run")
    own.tell("on_train_begin")
    yield own
    own.tell("on_train_end")


def test_the_endpoint_is_for_its_owner_and_goes_away_with_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.tell("on_train_begin")
    file = Endpoint.path(run.folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    assert endpoint.pid == os.getpid()
    assert len(endpoint.token) > 40
    assert liveness(run.folder) == "running"
    run.tell("on_train_end")
    assert list(run.folder.iterdir()) == []
    assert liveness(run.folder) == "ended"
    with pytest.raises(RequestError, match="is not running: it has no endpoint.json"):
        ask(run.folder, "status")


def test_every_run_has_a_token_of_its_own(tmp_path: Path) -> None:
    runs = [Run(tmp_path / name) for name in "ab"]
    for run in runs:
        run.tell("on_train_begin")
    tokens = {endpoint.token for run in runs if (endpoint := Endpoint.read(run.folder)) is not None}
    for run in runs:
        run.tell("on_train_end")
    assert len(tokens) == 2


def test_status(run: Run) -> None:
    assert ask(run.folder, "status")["status"] == {
        "pid": os.getpid(), "step": 0, "max_steps": 100, "loss": None, "lr": None, "tokens_per_second": None,
        "eta_seconds": None, "checkpoint": None,
    }  # fmt: skip
    for _ in range(20):
        run.step()
    run.tell("on_save", checkpoint=Path("run/checkpoints/step-00000020"), step=20)
    assert ask(run.folder, "status")["status"] == {
        "pid": os.getpid(), "step": 20, "max_steps": 100, "loss": 2.5, "lr": 1e-3, "tokens_per_second": 1024.0,
        "eta_seconds": pytest.approx(40.0), "checkpoint": "run/checkpoints/step-00000020",
    }  # fmt: skip
    assert not run.control.ends_training


@pytest.mark.parametrize(
    ("verb", "save", "stop", "abort", "hurry"),
    [
        ("status", False, False, False, False),
        ("save", True, False, False, False),
        ("stop", False, True, False, False),
        ("save-stop", True, True, False, True),
        ("abort", False, False, True, False),
    ],
)
def test_what_each_verb_does_after_the_step(
    run: Run, verb: str, save: bool, stop: bool, abort: bool, hurry: bool
) -> None:
    reply = ask(run.folder, verb)
    assert verb == "status" or reply["says"] == VERBS[verb]
    assert run.control == TrainerControl()  # not in the middle of a step
    run.step()
    assert run.control == TrainerControl(should_save=save, should_training_stop=stop, should_abort_without_save=abort)
    assert run.callback.drains is hurry
    kind = "abort" if abort else "stop"
    asked = ("ControlCallback", "on_step_end", kind) if stop or abort else None
    assert run.callbacks.stopped_by == asked
    assert run.callback.reason == (f"whimbrel control {verb}" if asked else None)


def test_a_request_during_an_evaluation_is_heard_after_it(run: Run) -> None:
    run.step()
    ask(run.folder, "stop")
    run.tell("on_evaluate", metrics={"eval_loss": 1.0})
    assert run.control.should_training_stop


def test_requests_add_up(run: Run) -> None:
    ask(run.folder, "save")
    ask(run.folder, "stop")
    run.step()
    assert run.control == TrainerControl(should_save=True, should_training_stop=True)
    assert not run.callback.drains


def talk(run: Run, data: bytes, wait: bool = True) -> bytes:
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as connection:
        connection.sendall(data)
        return connection.recv(1 << 16) if wait else b""


def request(run: Run, **changes: object) -> bytes:
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    return json.dumps({"token": endpoint.token, "verb": "abort", **changes}).encode() + b"\n"


@pytest.mark.parametrize("token", ["", "x" * 43, None, 7, ["a"], "\ud800", "é" * 20, {"a": 1}])
def test_a_wrong_token_moves_nothing(run: Run, token: object) -> None:
    assert json.loads(talk(run, request(run, token=token))) == {"ok": False, "error": "the token is wrong"}
    run.step()
    assert run.control == TrainerControl()


@pytest.mark.parametrize("verb", ["", "die", None, 3, ["save"], {"save": 1}])
def test_an_unknown_verb_is_refused(run: Run, verb: object) -> None:
    reply = json.loads(talk(run, request(run, verb=verb)))
    assert reply == {"ok": False, "error": "the verb is none of status, save, stop, save-stop, abort"}


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n",
        b"\xff\xfe\n",
        b"[" * (LONGEST - 1) + b"\n",
        b"[]\n",
        b"null\n",
        b"9" * 4000 + b"\n",
    ],
)
def test_nonsense_is_answered_and_forgotten(run: Run, data: bytes) -> None:
    reply = json.loads(talk(run, data))
    assert reply == {"ok": False, "error": "a request is one line of JSON of at most 4096 bytes"}
    assert ask(run.folder, "status")["ok"]


def test_oversized_silent_and_vanishing_clients_do_not_keep_others_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whimbrel.train.control.PATIENCE", 0.2)
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    address = ("127.0.0.1", endpoint.port)
    for _ in range(3):
        talk(run, b"x" * 10, wait=False)  # goes away in the middle
    with socket.create_connection(address) as silent, socket.create_connection(address) as large:
        large.setblocking(False)
        large.send(b"x" * 1_000_000)
        run.step()  # the job does not care
        assert ask(run.folder, "status", seconds=10)["status"]["step"] == 1
        assert silent.recv(1) == b""  # hung up on
    run.step()
    assert run.control == TrainerControl()


def test_silent_connections_do_not_delay_a_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.train.control.PATIENCE", 600.0)
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", endpoint.port)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(5)]
        assert ask(run.folder, "status", seconds=60)["ok"]
        silent += [stack.enter_context(socket.create_connection(address)) for _ in range(2 * MAX_CLIENTS)]
        assert ask(run.folder, "status", seconds=60)["ok"]
        assert silent[0].recv(1) == b""  # closed for newer ones


def test_a_slow_client_has_a_deadline_for_the_whole_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.train.control.PATIENCE", 0.3)
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    with socket.create_connection(("127.0.0.1", endpoint.port)) as slow:
        with pytest.raises(OSError):  # broken pipe or reset, as it comes
            for _ in range(200):
                slow.sendall(b" ")
                time.sleep(0.02)
    assert ask(run.folder, "status")["ok"]


JOB = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from whimbrel.train.control import ControlCallback
from whimbrel.train.state import TrainerState
trainer = SimpleNamespace(config=SimpleNamespace(output_dir=Path(sys.argv[1])))
ControlCallback().on_train_begin(state=TrainerState(max_steps=9), trainer=trainer)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_job_is_dead_and_its_directory_free(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = subprocess.Popen([sys.executable, "-c", JOB, str(folder)], stdout=subprocess.PIPE, text=True)
    with job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        assert liveness(folder) == "running"
        assert ask(folder, "status")["status"]["pid"] == job.pid
        try:
            job.send_signal(signal.SIGSTOP)  # it is there, but does not get to answer
            os.waitpid(job.pid, os.WUNTRACED)  # a signal takes its time
            assert liveness(folder, seconds=0.2) == "running"
            with pytest.raises(RequestError, match=r"does not answer within 0\.2 s"):
                ask(folder, "stop", seconds=0.2)
        finally:
            job.kill()
    assert Endpoint.path(folder).exists()
    assert liveness(folder) == "dead"
    with pytest.raises(RequestError, match="is not running: nobody listens at its endpoint"):
        ask(folder, "stop")
    run = Run(folder)
    run.tell("on_train_begin")
    assert ask(folder, "status")["status"]["pid"] == os.getpid()
    run.tell("on_train_end")


def test_someone_else_at_the_port_is_not_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.tell("on_train_begin")
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    other = tmp_path / "other"
    replace(endpoint, token="another").write(other)
    assert liveness(other) == "dead"
    with pytest.raises(RequestError, match="refused: the token is wrong"):
        ask(other, "stop")
    run.tell("on_train_end")


def test_a_run_on_another_machine(tmp_path: Path) -> None:
    Endpoint(host="elsewhere.example", port=1, token="t", pid=1).write(tmp_path)
    assert liveness(tmp_path) == "elsewhere"
    with pytest.raises(RequestError, match=r"runs on elsewhere\.example: ask it there"):
        ask(tmp_path, "stop")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"host": "a"}'])
def test_a_file_that_is_no_endpoint(tmp_path: Path, text: str) -> None:
    (tmp_path / "endpoint.json").write_text(text)
    assert Endpoint.read(tmp_path) is None
