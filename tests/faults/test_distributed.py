"""A distributed run survives the loss of a process: it continues by itself, with the curve of an unbroken run."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import RECIPE, DistributedRun
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
    "signals": [("kill", 1), ("kill", 0), ("stop", 1), ("terminate", 0)],
    "errors": [("raise", 1), ("disk", 0)],
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
    run = DistributedRun(tmp_path, LD_PRELOAD=str(shim))
    yield run
    run.kill()


def start(run: DistributedRun) -> None:
    run.start(sys.executable, HERE / "worker.py", "train", "recipe.toml", "--plain", "--nproc", 2, "--max-restarts", 9)


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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCENARIOS)
def test_run_continues_after_faults_with_the_curve_of_an_unbroken_run(
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
    losses = run.losses()
    assert list(losses) == list(range(1, len(losses) + 1))
    assert losses == pytest.approx(unbroken_losses(run, len(losses), monkeypatch), rel=TOLERANCE)
    kinds = ", ".join(f"{kind} rank {rank}" for kind, rank in SCENARIOS[name])
    record_property(
        "faults",
        f"distributed: {len(SCENARIOS[name])} faults ({kinds}), {len(losses)} steps, stepping again "
        f"{max(run_seconds, default=0.0):.1f} s after the restart",
    )
