"""Control of a running job: requests with its token are applied, all others are rejected."""

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
from whimbrel.train.callback import Callbacks, TrainerControl, TrainerState
from whimbrel.train.control import (
    ACTIONS,
    MAX_CLIENTS,
    MAX_REQUEST_BYTES,
    ControlCallback,
    Endpoint,
    query_status,
    send_request,
)


class Run:
    """A fake training job; `step` runs one step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.callback = ControlCallback()
        self.callbacks = Callbacks([self.callback])
        self.control = TrainerControl()
        self.state = TrainerState(max_steps=100)
        self.trainer = SimpleNamespace(config=SimpleNamespace(output_dir=folder))

    def dispatch(self, event: str, **keywords: Any) -> None:
        self.control = self.callbacks.dispatch(event, self.control, state=self.state, trainer=self.trainer, **keywords)

    def step(self) -> None:
        self.state.global_step += 1
        self.dispatch("on_step_end")
        step = self.state.global_step
        metrics = {"step": step, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "tokens": 512, "seconds": 0.5}
        self.dispatch("on_train_metrics", metrics=metrics)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    own = Run(tmp_path / "run")
    own.dispatch("on_train_begin")
    yield own
    own.dispatch("on_train_end")


def test_the_endpoint_is_private_and_removed_with_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.dispatch("on_train_begin")
    file = Endpoint.path(run.folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    assert endpoint.pid == os.getpid()
    assert len(endpoint.token) > 40
    assert query_status(run.folder)[0] == "running"
    run.dispatch("on_train_end")
    assert list(run.folder.iterdir()) == []
    assert query_status(run.folder)[0] == "ended"
    with pytest.raises(RequestError, match="no such run directory"):
        send_request(tmp_path / "other", "status")
    with pytest.raises(RequestError, match="is not running: it has no endpoint.json"):
        send_request(run.folder, "status")


def test_every_run_has_its_own_token(tmp_path: Path) -> None:
    runs = [Run(tmp_path / name) for name in "ab"]
    for run in runs:
        run.dispatch("on_train_begin")
    tokens = {endpoint.token for run in runs if (endpoint := Endpoint.read(run.folder)) is not None}
    for run in runs:
        run.dispatch("on_train_end")
    assert len(tokens) == 2


def test_status_reports_the_latest_metrics(run: Run) -> None:
    assert send_request(run.folder, "status")["status"] == {
        "pid": os.getpid(), "step": 0, "max_steps": 100, "loss": None, "lr": None, "tokens_per_second": None,
        "eta_seconds": None, "checkpoint": None,
    }  # fmt: skip
    for _ in range(20):
        run.step()
    run.dispatch("on_save", checkpoint=Path("run/checkpoints/step-00000020"), step=20)
    assert send_request(run.folder, "status")["status"] == {
        "pid": os.getpid(), "step": 20, "max_steps": 100, "loss": 2.5, "lr": 1e-3, "tokens_per_second": 1024.0,
        "eta_seconds": pytest.approx(40.0), "checkpoint": "run/checkpoints/step-00000020",
    }  # fmt: skip
    assert not run.control.should_stop


@pytest.mark.parametrize(
    ("action", "save", "stop", "abort", "hurry"),
    [
        ("status", False, False, False, False),
        ("save", True, False, False, False),
        ("stop", False, True, False, False),
        ("save-stop", True, True, False, True),
        ("abort", False, False, True, False),
    ],
)
def test_actions_are_applied_after_the_step(
    run: Run, action: str, save: bool, stop: bool, abort: bool, hurry: bool
) -> None:
    reply = send_request(run.folder, action)
    assert action == "status" or reply["message"] == ACTIONS[action]
    assert run.control == TrainerControl()  # not in the middle of a step
    run.step()
    assert run.control == TrainerControl(should_save=save, should_training_stop=stop, should_abort_without_save=abort)
    assert run.callback.is_draining is hurry
    kind = "abort" if abort else "stop"
    stopped_by = ("ControlCallback", "on_step_end", kind) if stop or abort else None
    assert run.callbacks.stopped_by == stopped_by
    assert run.callback.reason == (f"requested by whimbrel control {action}" if stopped_by else None)


def test_a_request_during_an_evaluation_is_applied_after_it(run: Run) -> None:
    run.step()
    send_request(run.folder, "stop")
    run.dispatch("on_evaluate", metrics={"eval_loss": 1.0})
    assert run.control.should_training_stop


def test_several_requests_are_combined(run: Run) -> None:
    send_request(run.folder, "save")
    send_request(run.folder, "stop")
    run.step()
    assert run.control == TrainerControl(should_save=True, should_training_stop=True)
    assert not run.callback.is_draining


def send_raw(run: Run, data: bytes, wait: bool = True) -> bytes:
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as connection:
        connection.sendall(data)
        return connection.recv(1 << 16) if wait else b""


def request(run: Run, **changes: object) -> bytes:
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    return json.dumps({"token": endpoint.token, "action": "abort", **changes}).encode() + b"\n"


@pytest.mark.parametrize("token", ["", "x" * 43, None, 7, ["a"], "\ud800", "é" * 20, {"a": 1}])
def test_a_wrong_token_has_no_effect(run: Run, token: object) -> None:
    assert json.loads(send_raw(run, request(run, token=token))) == {"ok": False, "error": "wrong token"}
    run.step()
    assert run.control == TrainerControl()


@pytest.mark.parametrize("action", ["", "die", None, 3, ["save"], {"save": 1}])
def test_an_unknown_action_is_rejected(run: Run, action: object) -> None:
    reply = json.loads(send_raw(run, request(run, action=action)))
    assert reply["ok"] is False
    assert "unknown action" in reply["error"]


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n",
        b"\xff\xfe\n",
        b"[" * (MAX_REQUEST_BYTES - 1) + b"\n",
        b"[]\n",
        b"null\n",
        b"9" * 4000 + b"\n",
    ],
)
def test_invalid_requests_get_an_error(run: Run, data: bytes) -> None:
    reply = json.loads(send_raw(run, data))
    assert reply == {"ok": False, "error": "expected one line of JSON of at most 4096 bytes"}
    assert send_request(run.folder, "status")["ok"]


def test_misbehaving_clients_do_not_block_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.train.control.REQUEST_TIMEOUT", 0.2)
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    address = ("127.0.0.1", endpoint.port)
    for _ in range(3):
        send_raw(run, b"x" * 10, wait=False)  # disconnects in the middle
    with socket.create_connection(address) as silent, socket.create_connection(address) as large:
        large.setblocking(False)
        large.send(b"x" * 1_000_000)
        run.step()  # the job ignores it
        assert send_request(run.folder, "status", timeout=10)["status"]["step"] == 1
        assert silent.recv(1) == b""  # connection closed by the job
    run.step()
    assert run.control == TrainerControl()


def test_silent_connections_do_not_delay_a_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.train.control.REQUEST_TIMEOUT", 600.0)
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", endpoint.port)
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(5)]
        assert send_request(run.folder, "status", timeout=60)["ok"]
        silent += [stack.enter_context(socket.create_connection(address)) for _ in range(2 * MAX_CLIENTS)]
        assert send_request(run.folder, "status", timeout=60)["ok"]
        assert silent[0].recv(1) == b""  # closed for newer ones


def test_a_slow_client_has_a_deadline_for_its_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.train.control.REQUEST_TIMEOUT", 0.3)
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    with socket.create_connection(("127.0.0.1", endpoint.port)) as slow:
        with pytest.raises(OSError):  # broken pipe or reset, as it comes
            for _ in range(200):
                slow.sendall(b" ")
                time.sleep(0.02)
    assert send_request(run.folder, "status")["ok"]


JOB = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from whimbrel.train.control import ControlCallback
from whimbrel.train.callback import TrainerState
trainer = SimpleNamespace(config=SimpleNamespace(output_dir=Path(sys.argv[1])))
ControlCallback().on_train_begin(state=TrainerState(max_steps=9), trainer=trainer)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_run_is_dead_and_can_be_restarted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = subprocess.Popen([sys.executable, "-c", JOB, str(folder)], stdout=subprocess.PIPE, text=True)
    with job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        assert query_status(folder)[0] == "running"
        assert send_request(folder, "status")["status"]["pid"] == job.pid
        try:
            job.send_signal(signal.SIGSTOP)  # the process exists but is stopped and cannot answer
            os.waitpid(job.pid, os.WUNTRACED)  # signals are delivered asynchronously
            assert query_status(folder, timeout=0.2)[0] == "running"
            with pytest.raises(RequestError, match=r"did not answer within 0\.2 s"):
                send_request(folder, "stop", timeout=0.2)
        finally:
            job.kill()
    assert Endpoint.path(folder).exists()
    assert query_status(folder)[0] == "dead"
    with pytest.raises(RequestError, match="is not running: its endpoint"):
        send_request(folder, "stop")
    run = Run(folder)
    run.dispatch("on_train_begin")
    assert send_request(folder, "status")["status"]["pid"] == os.getpid()
    run.dispatch("on_train_end")


def test_another_process_at_the_port_is_not_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.dispatch("on_train_begin")
    endpoint = Endpoint.read(run.folder)
    assert endpoint is not None
    other = tmp_path / "other"
    replace(endpoint, token="another").write(other)
    assert query_status(other)[0] == "dead"
    with pytest.raises(RequestError, match="rejected.*wrong token"):
        send_request(other, "stop")
    run.dispatch("on_train_end")


def test_a_run_on_another_host(tmp_path: Path) -> None:
    Endpoint(host="other.example", port=1, token="t", pid=1).write(tmp_path)
    assert query_status(tmp_path)[0] == "other-host"
    with pytest.raises(RequestError, match=r"running on other\.example"):
        send_request(tmp_path, "stop")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"host": "a"}'])
def test_an_invalid_endpoint_file_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "endpoint.json").write_text(text)
    assert Endpoint.read(tmp_path) is None
