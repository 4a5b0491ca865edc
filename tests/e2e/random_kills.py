"""Kill a training run at random times until it has finished, and print a JSON report.

Usage: `python random_kills.py KILLS SEED [SCRIPT]`. Runs `whimbrel train recipe.toml` in the current directory, or
SCRIPT, which defines STEPS, EVERY and main(); both write to `run`. The first run is not killed and becomes
`uninterrupted`. The next is killed at random times, 40% of them during a save (its temporary directory exists), is
checked, and restarts with the same command; when it finishes, it becomes `killed-0`. If there are kills left, another
run starts.

This process has imported torch and has no other threads, so most attempts are forked from it: 300 of them take minutes,
not hours. Some start as `python -m whimbrel`.
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

# Import once what every attempt needs; the first optimizer step imports _dynamo.
import torch._dynamo

import whimbrel.inference  # noqa: F401
from whimbrel.base.errors import CheckpointError
from whimbrel.base.files import PARTIAL
from whimbrel.checkpoint import list_checkpoints, verify_checkpoint
from whimbrel.cli.main import main as command_line
from whimbrel.train import load_run_config
from whimbrel.train.control import Endpoint, query_status

RECIPE, RUN, OUTPUT = Path("recipe.toml"), Path("run"), Path("output.txt")
SCRIPT = sys.argv[3] if len(sys.argv) > 3 else None
DURING_SAVE, AFTER_LAST_SAVE = 0.4, 0.1
"""Fractions of the kills during a save, and between the last save and the exit."""
FRESH = 0.1
"""Fraction of the kills of new processes, which are not forks of this one."""
MAX_SAVES = 3
"""Maximum number of saves of an attempt before it is killed."""
ATTEMPT_SECONDS = 600.0
"""Time limit of an attempt: ends a hang, never a slow machine."""


class Attempt:
    """A process, forked or new, that runs the training and appends its output to OUTPUT."""

    def __init__(self, *, fresh: bool = False) -> None:
        self.code: int | None = None
        """Exit code; negative if killed, None while running."""
        self._output_start = OUTPUT.stat().st_size if OUTPUT.exists() else 0
        self.pid = _spawn() if fresh else _fork()
        if fresh:  # start-up time, mostly importing torch, does not count
            for _ in self.watch():
                if self.training:
                    break

    def watch(self) -> Iterator[None]:
        """Yield until the process has exited."""
        end = time.monotonic() + ATTEMPT_SECONDS
        while self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
                return
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.pid} hangs: {output_tail()}")
            yield
            time.sleep(0.0005)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has exited."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def training(self) -> bool:
        """Whether training has started."""
        endpoint = Endpoint.read(RUN)
        return endpoint is not None and endpoint.pid == self.pid

    @property
    def steps(self) -> list[int]:
        """Step counts after each step that the attempt printed."""
        with OUTPUT.open("rb") as file:
            file.seek(self._output_start)
            return [int(step) for step in re.findall(rb"^step:(\d+)/", file.read(), re.MULTILINE)]

    @property
    def save(self) -> Path | None:
        """The temporary directory of an unfinished save."""
        return next((RUN / "checkpoints").glob(f"{PARTIAL}{self.pid}-*"), None)


def _spawn() -> int:
    command = [sys.executable, *([SCRIPT] if SCRIPT else ["-m", "whimbrel", "train", str(RECIPE)])]
    output = (os.POSIX_SPAWN_OPEN, 1, OUTPUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=[output, (os.POSIX_SPAWN_DUP2, 1, 2)])


def _fork() -> int:
    child = os.fork()
    if child:
        return child
    try:
        output = os.open(OUTPUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if SCRIPT:
            runpy.run_path(SCRIPT)["main"]()
            sys.exit(0)
        command_line(["train", str(RECIPE)])
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))
    finally:
        os._exit(70)


def output_tail() -> str:
    return OUTPUT.read_text(errors="replace")[-500:]


@dataclass
class Times:
    """Measured durations in seconds."""

    start_up: float
    save: float
    between_saves: float
    end: float
    """From the last checkpoint to the exit."""


def run_uninterrupted(last: int) -> Times:
    """Run to the end once and measure the saves."""
    start, trains, saved, begins, ends = time.monotonic(), 0.0, 0.0, [], []
    attempt = Attempt()
    for _ in attempt.watch():
        now, saving = time.monotonic(), attempt.save is not None
        trains = trains or (now if attempt.training else 0.0)
        saved = saved or (now if last in list_checkpoints(RUN) else 0.0)
        if saving != (len(begins) > len(ends)):
            (begins if saving else ends).append(now)
    if attempt.code:
        raise RuntimeError(f"the uninterrupted run exited with {attempt.code}: {output_tail()}")
    save = median(end - begin for begin, end in zip(begins, ends, strict=False))
    between_saves = median(later - sooner for sooner, later in pairwise(begins))
    return Times(trains - start, save, between_saves, time.monotonic() - saved)


@dataclass
class Killer:
    """Waits for the time of a kill; returns early if the attempt exits by itself."""

    rng: random.Random
    times: Times
    last: int
    """The last step of a run."""

    def at_any_time(self, attempt: Attempt) -> None:
        """Wait for a random time after the start."""
        instant = time.monotonic() + self.rng.uniform(0, self.times.start_up + MAX_SAVES * self.times.between_saves)
        for _ in attempt.watch():
            if time.monotonic() >= instant:
                return

    def during_save(self, attempt: Attempt, first: int | None = None) -> None:
        """Wait for a random time during a save, after `first` earlier saves (default: random)."""
        left, instant, before = self.rng.randrange(MAX_SAVES) if first is None else first, 0.0, None
        for _ in attempt.watch():
            now, save = time.monotonic(), attempt.save
            if save is not None and save != before:
                left, instant = left - 1, now + self.rng.uniform(0, self.times.save)
            if save is not None and left < 0 and now >= instant:
                return
            before = save

    def after_last_save(self, attempt: Attempt) -> None:
        """Wait for a random time between the last save and the exit."""
        instant = 0.0
        for _ in attempt.watch():
            now = time.monotonic()
            if not instant and self.last in list_checkpoints(RUN):
                instant = now + self.rng.uniform(0, self.times.end)
            if instant and now >= instant:
                return
        self.times.end /= 2  # the process exited first: try an earlier time next

    def never(self, attempt: Attempt) -> None:
        """Wait for the exit."""
        for _ in attempt.watch():
            pass

    def plan(self, kills: int) -> list[Callable[[Attempt], None]]:
        """The time of each kill; before the last one, there is a checkpoint to resume from."""
        aimed, late = round(DURING_SAVE * kills), max(1, round(AFTER_LAST_SAVE * kills))
        plan: list[Callable[[Attempt], None]] = [self.during_save] * (aimed - 1) + [self.after_last_save] * late
        plan += [self.at_any_time] * (kills - aimed - late)
        self.rng.shuffle(plan)
        return [*plan, partial(self.during_save, first=1)]


@dataclass
class Report:
    """Results of the kills."""

    kills: int = 0
    inside: int = 0
    """Kills that left an unfinished save."""
    fresh: int = 0
    """Kills of processes that were not forked."""
    runs: int = 0
    """Runs that finished."""
    resumed: int = 0
    """Attempts that resumed from a checkpoint."""
    newest: list[int] = field(default_factory=list)
    """The step of the newest checkpoint after each kill."""
    faults: list[str] = field(default_factory=list)

    def check_after_kill(self, before: int, steps: list[int], at_risk: int) -> int:
        """Check that all checkpoints are valid, that none was lost, and that the run is listed as dead.

        The attempt must have resumed from the newest checkpoint and have lost at most `at_risk` steps.
        """
        found = list_checkpoints(RUN)
        newest = max(found, default=0)
        if newest < before:
            self.faults.append(f"kill {self.kills}: step {before} had a checkpoint, found only {list(found)}")
        self.check_steps(before, steps)
        if steps and steps[-1] - newest > at_risk:
            self.faults.append(f"kill {self.kills}: step {steps[-1]} was done, but the newest checkpoint is {newest}")
        for path in found.values():
            try:
                verify_checkpoint(path)
            except CheckpointError as error:
                self.faults.append(f"kill {self.kills}: {error}")
        if Endpoint.path(RUN).exists() and query_status(RUN)[0] != "dead":
            self.faults.append(f"kill {self.kills}: the run is listed as {query_status(RUN)[0]}")
        self.newest.append(newest)
        return newest

    def check_steps(self, before: int, steps: list[int]) -> None:
        """Check that an attempt ran every step after the checkpoint it resumed from."""
        if steps and steps != list(range(before + 1, steps[-1] + 1)):
            self.faults.append(f"after kill {self.kills}: expected steps from {before + 1} on, got {steps}")
        self.resumed += bool(steps) and before > 0


def main() -> None:
    kills, rng = int(sys.argv[1]), random.Random(sys.argv[2])
    torch.set_num_threads(1)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a process with threads cannot fork itself safely")
    if SCRIPT:
        names = runpy.run_path(SCRIPT)
        last, at_risk = names["STEPS"], 2 * names["EVERY"]
    else:
        config = load_run_config(RECIPE)
        last, every = config.train.steps or 0, int(config.checkpoint.every or 0)
        # an asynchronous save may take until the next one, which waits for it
        at_risk = 2 * every if config.checkpoint.asynchronous else every
    times = run_uninterrupted(last)
    RUN.rename("uninterrupted")
    killer, report, newest = Killer(rng, times, last), Report(), 0
    plan, fresh = killer.plan(kills), set(rng.sample(range(kills), max(1, round(FRESH * kills))))
    while report.kills < kills or RUN.exists():
        attempt = Attempt(fresh=report.kills in fresh)
        wait = plan[report.kills] if report.kills < kills else killer.never
        wait(attempt)
        attempt.kill()
        if attempt.code == -signal.SIGKILL:
            report.inside += attempt.save is not None
            report.fresh += report.kills in fresh
            report.kills += 1
            newest = report.check_after_kill(newest, attempt.steps, at_risk)
        elif attempt.code == 0:
            report.check_steps(newest, attempt.steps)
            RUN.rename(f"killed-{report.runs}")
            report.runs, newest = report.runs + 1, 0
        else:
            report.faults.append(f"after kill {report.kills}: exit code {attempt.code}: {output_tail()}")
            break
    json.dump(asdict(report) | asdict(times), sys.stdout)


if __name__ == "__main__":
    main()
