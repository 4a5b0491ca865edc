"""`whimbrel control` of a run in another process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.commands import wait_until
from tests.support.runs import prepare_text

from whimbrel.checkpoint import latest_checkpoint
from whimbrel.cli.main import main
from whimbrel.train.control import Endpoint
from whimbrel.train.run_directory import last_line, read_log

OUTPUT = Path("output.txt")
RECIPE = """
output_dir = "run"
[model]
context_length = 32
vocab_size = 300
num_layers = 1
embd_size = 16
num_heads = 2
[data]
path = "shards"
[train]
steps = 1000000
tokens_per_step = 64
device = "cpu"
"""


@pytest.fixture
def folder(workdir: Path, shakespeare: str) -> Path:
    prepare_text(workdir, shakespeare[:20_000], val_tokens=800)
    (workdir / "recipe.toml").write_text(RECIPE)
    return workdir


@pytest.fixture
def job(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A training process, which is killed if the test fails. Its output is a file: it would block on a full pipe."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "whimbrel", "train", "recipe.toml"]
    with OUTPUT.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_exit(job: subprocess.Popen[bytes]) -> str:
    """Wait until the job exits with code 0. Returns its output."""
    code = job.wait(600)
    out = OUTPUT.read_text()
    assert code == 0, out
    return out


def control(capsys: pytest.CaptureFixture[str], action: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["control", "run", action])
    assert not ended.value.code, capsys.readouterr().err
    return capsys.readouterr().out


def status(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return dict(re.split(r"\s{2,}", line.strip()) for line in control(capsys, "status").splitlines())


def test_running_job_reports_status_saves_and_stops(
    folder: Path, job: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    run, log = folder / "run", folder / "run" / "log.jsonl"
    wait_until(job, lambda: Endpoint.read(run) is not None, OUTPUT)
    wait_until(
        job, lambda: "loss" in status(capsys), OUTPUT
    )  # log.jsonl may have the first step before the status does
    reported = status(capsys)
    assert reported["process"] == str(job.pid)
    assert re.fullmatch(r"\d+/1000000", reported["step"])
    assert {"loss", "lr", "tokens/s", "time left"} <= reported.keys()
    assert "saves after the current step" in control(capsys, "save")
    wait_until(job, lambda: latest_checkpoint(run) is not None)
    first = latest_checkpoint(run)
    assert "without an evaluation" in control(capsys, "save-stop")
    out = wait_for_exit(job)
    assert "Stopping: requested by whimbrel control save-stop" in out
    assert re.search(r"Stopped at step \d+, saved to run/checkpoints/step-\d+: rerun the same command to resume", out)
    last = latest_checkpoint(run)
    assert last is not None
    assert last != first
    assert read_log(log)[-1]["after"] == int(last.name.removeprefix("step-"))
    assert not any(line["kind"] == "validation" for line in read_log(log))
    assert Endpoint.read(run) is None


@pytest.mark.parametrize(("action", "validated", "saved"), [("stop", True, True), ("abort", False, False)])
def test_stop_evaluates_and_saves_and_abort_does_neither(
    folder: Path,
    job: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
    action: str,
    validated: bool,
    saved: bool,
) -> None:
    run, log = folder / "run", folder / "run" / "log.jsonl"
    wait_until(job, lambda: Endpoint.read(run) is not None and last_line(log, "step") is not None)
    control(capsys, action)
    out = wait_for_exit(job)
    assert f"{'Aborting' if action == 'abort' else 'Stopping'}: requested by whimbrel control {action}" in out
    assert any(line["kind"] == "validation" for line in read_log(log)) is validated
    assert (latest_checkpoint(run) is not None) is saved


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "die"], "unknown action 'die' (choose from: status, save, stop, save-stop, abort)"),
        (["run", "stop"], "no such run directory: run"),
        (["experimnet", "stop"], "no such run directory: experimnet: did you mean experiment?"),
        ([".", "stop"], ". is not running: it has no endpoint.json"),
    ],
)
def test_error_is_one_line(workdir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    (workdir / "experiment").mkdir()
    (workdir / "experiment" / "config.toml").touch()
    with pytest.raises(SystemExit) as ended:
        main(["control", *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"whimbrel: {line}\n"
