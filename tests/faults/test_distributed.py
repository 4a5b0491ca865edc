"""A distributed run survives the loss of a process: it continues by itself, with the curve of an unbroken run."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import whimbrel
from tests.support.processes import PATIENCE, RECIPE, TORCHRUN, DistributedRun, free_endpoint
from tests.support.runs import prepare_text

from whimbrel.train import Trainer, TrainerCallback, load_run_config, read_log

SOAK = os.environ.get("WHIMBREL_SOAK") == "1"
TIMEOUT = 6
"""Seconds after which the others give up a process that does not answer."""
HERE = Path(__file__).parent
KINDS = ("kill", "stop", "terminate", "raise", "disk")
TOLERANCE = 1e-5
"""fp32 sums over ranks in another order than in one process."""

Fault = tuple[str, int]
SCENARIOS: dict[str, list[Fault]] = {
    "all": [("kill", 1), ("disk", 0), ("kill", 0), ("raise", 1), ("stop", 1), ("terminate", 0)],
}
if SOAK:
    every = [*itertools.product(KINDS, (0, 1))] * 6
    random.Random(0).shuffle(every)
    SCENARIOS = {f"soak-{n}": every[6 * n : 6 * n + 6] for n in range(10)}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, shakespeare: str) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare_text(folder, shakespeare[:50_000], val_tokens=800)
    return folder / "shards"


@pytest.fixture
def run(tmp_path: Path, shards: Path, shim: Path) -> Iterator[DistributedRun]:
    (tmp_path / "shards").symlink_to(shards)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(steps=100_000, every=10, timeout=TIMEOUT))
    # torch 2.13 would give machines that join later no address to connect to.
    run = DistributedRun(tmp_path, LD_PRELOAD=str(shim), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    yield run
    run.kill()


def start(run: DistributedRun) -> None:
    run.start(sys.executable, HERE / "worker.py", "train", "recipe.toml", "--plain", "--nproc", 2, "--max-restarts", 99)


def inject(run: DistributedRun, kind: str, rank: int) -> None:
    """Break the run. Returns when it is stepping again, with new processes where it was restarted."""
    starts, failures = run.starts(), run.text().count("No space left on device")
    if kind in ("raise", "disk"):
        (run.folder / f"fault-{rank}").write_text(kind)
    elif kind in ("kill", "stop"):
        os.kill(run.worker(rank), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    else:
        run.launchers[-1].send_signal(signal.SIGTERM)
        assert run.wait_for_exit() == 0, run.text()
        start(run)
    if kind == "disk":
        run.wait(lambda: run.text().count("No space left on device") > failures)
        saved = checkpoints(run)
        run.wait(lambda: checkpoints(run) > saved)
        return
    run.wait(lambda: run.starts() > starts)
    restarted = time.monotonic()
    run.wait(run.is_stepping)
    run_seconds.append(time.monotonic() - restarted)


run_seconds: list[float] = []
"""From the connection of new processes to their first step."""


def checkpoints(run: DistributedRun) -> int:
    """The newest checkpoint that was reported."""
    return max(
        (int(line.split()[3][:-1]) for line in run.text().splitlines() if line.startswith("checkpoint ")), default=0
    )


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, **event: Any) -> None:
        event["control"].should_abort_without_save = event["state"].global_step >= self._step


def unbroken_losses(run: DistributedRun, steps: int, monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The losses of one process that is never interrupted."""
    monkeypatch.chdir(run.folder)
    config = load_run_config(Path("recipe.toml"), ["--output_dir=unbroken", "--checkpoint.every=none"])
    Trainer.from_config(config, callbacks=[StopAt(steps + 1)]).train()
    lines = read_log(run.folder / "unbroken" / "log.jsonl")
    return {line["after"]: line["loss"] for line in lines if line["kind"] == "step" and line["after"] <= steps}


def check_curve(run: DistributedRun, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every step is logged once, with the loss of an unbroken run. Returns the number of steps."""
    losses = run.losses()
    assert list(losses) == list(range(1, len(losses) + 1))
    assert losses == pytest.approx(unbroken_losses(run, len(losses), monkeypatch), rel=TOLERANCE)
    return len(losses)


@pytest.mark.parametrize("name", SCENARIOS)
def test_run_with_faults_matches_an_uninterrupted_run(
    run: DistributedRun,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    moments = random.Random(name)
    run_seconds.clear()
    start(run)
    for kind, rank in SCENARIOS[name]:
        run.wait(run.is_stepping)
        time.sleep(moments.uniform(0, 1))
        inject(run, kind, rank)
    run.launchers[-1].send_signal(signal.SIGTERM)
    assert run.wait_for_exit() == 0, run.text()
    steps = check_curve(run, monkeypatch)
    kinds = ", ".join(f"{kind} rank {rank}" for kind, rank in SCENARIOS[name])
    record_property(
        "faults",
        f"distributed: {len(SCENARIOS[name])} faults ({kinds}), {steps} steps, stepping again "
        f"{max(run_seconds, default=0.0):.1f} s after the restart",
    )


@pytest.mark.skipif(not SOAK, reason="takes a minute: needs WHIMBREL_SOAK=1")
def test_run_continues_on_fewer_and_on_more_machines(run: DistributedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two torchrun agents; one is lost with its worker, and another one joins later."""
    monkeypatch.chdir(run.folder)
    patience = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10"
    options = (
        *("--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 99, "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", free_endpoint(), "--rdzv-conf", patience, HERE / "worker.py"),
    )

    def add_node() -> subprocess.Popen[bytes]:
        starts = run.starts()
        node = run.start(*TORCHRUN, *options, "train", "recipe.toml", "--plain")
        if len(run.launchers) > 1:  # one process alone does not say that it is distributed
            run.wait(lambda: run.starts() > starts and run.is_stepping())
        return node

    def wait_for_checkpoint() -> None:
        saved = checkpoints(run)
        run.wait(lambda: checkpoints(run) > saved)

    first = add_node()  # the others connect to it
    wait_for_checkpoint()
    second = add_node()
    wait_for_checkpoint()
    run.kill_node(second)
    steps = len(run.losses())
    run.wait(lambda: len(run.losses()) > steps + 20)
    assert list(run.processes().values()).count("0") == 1
    last = add_node()
    wait_for_checkpoint()
    assert whimbrel("control", "run", "stop") == 0
    assert [node.wait(PATIENCE) for node in (first, last)] == [0, 0], run.text()
    assert run.wait_for_exit() == 0
    check_curve(run, monkeypatch)
