"""Kills a training run again and again until it has finished: `python killing.py KILLS SEED` prints what it saw.

It works in the current folder, which holds a `recipe.toml` that writes to `run`, or, with a third argument, runs that
script, which has to write to `run` and to define STEPS, EVERY and main(). The first run is left in peace and
becomes `whole`. The next is killed at random instants, four of ten inside a save (the folder that a save is written in
has appeared and is still there), looked at, and begun again with the same command; once finished it becomes `broken-0`.
If there are kills left, another run follows it.

This process has torch loaded and runs no thread, so it can fork an attempt from itself, and 300 of them take minutes,
not hours. Some are `python -m whimbrel` from the start all the same.
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

# What every attempt would load is loaded here, once; the first step of an optimizer loads _dynamo.
import torch._dynamo

import whimbrel.inference  # noqa: F401
from whimbrel.base.errors import CheckpointError
from whimbrel.base.files import PARTIAL
from whimbrel.checkpoint import list_checkpoints, verify_checkpoint
from whimbrel.cli.main import main as command_line
from whimbrel.train import load_run_config
from whimbrel.train.control import Endpoint, run_status

RECIPE, RUN, OUTPUT = Path("recipe.toml"), Path("run"), Path("output.txt")
SCRIPT = sys.argv[3] if len(sys.argv) > 3 else None
AIMED, LATE = 0.4, 0.1
"""Shares of the kills that are aimed inside a save, and between the last save and the end."""
FRESH = 0.1
"""Share of the kills that hit a process which is not a fork of this one."""
LIFE = 3
"""Saves that an attempt lives to see at most."""
PATIENCE = 120.0
"""Seconds until an attempt that neither ends nor gets where it is to be killed counts as hung."""


class Attempt:
    """A process, forked or from the start, that runs `whimbrel train recipe.toml`, its output in a file."""

    def __init__(self, *, fresh: bool = False) -> None:
        self.code: int | None = None
        """Its exit code, once it has one."""
        self._said = OUTPUT.stat().st_size if OUTPUT.exists() else 0
        self.pid = _spawn() if fresh else _fork()
        if fresh:  # loading torch is no part of a run's life
            for _ in self.watch():
                if self.training:
                    break

    def watch(self) -> Iterator[None]:
        """Look again and again, until it has ended."""
        end = time.monotonic() + PATIENCE
        while self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
                return
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.pid} seems to hang: {said()}")
            yield
            time.sleep(0.0005)

    def kill(self) -> None:
        """End it at once, unless it has ended."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def training(self) -> bool:
        """Whether it has begun to train."""
        endpoint = Endpoint.read(RUN)
        return endpoint is not None and endpoint.pid == self.pid

    @property
    def steps(self) -> list[int]:
        """The steps that it has told of, in order, as their number when they are done."""
        with OUTPUT.open("rb") as file:
            file.seek(self._said)
            return [int(step) + 1 for step in re.findall(rb"^step:(\d+)/", file.read(), re.MULTILINE)]

    @property
    def save(self) -> Path | None:
        """The folder of a save that it has begun and not finished."""
        return next((RUN / "checkpoints").glob(f"{PARTIAL}{self.pid}-*"), None)


def _spawn() -> int:
    words = [sys.executable, *([SCRIPT] if SCRIPT else ["-m", "whimbrel", "train", str(RECIPE)])]
    output = (os.POSIX_SPAWN_OPEN, 1, OUTPUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    return os.posix_spawn(sys.executable, words, os.environ, file_actions=[output, (os.POSIX_SPAWN_DUP2, 1, 2)])


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


def said() -> str:
    """What the attempts printed last."""
    return OUTPUT.read_text(errors="replace")[-500:]


@dataclass
class Times:
    """How long things take here and now, in seconds."""

    start_up: float
    save: float
    between_saves: float
    end: float
    """From the last checkpoint to the exit."""


def run_unbroken(last: int) -> Times:
    """Run to the end once and watch the saves."""
    start, trains, saved, begins, ends = time.monotonic(), 0.0, 0.0, [], []
    attempt = Attempt()
    for _ in attempt.watch():
        now, saving = time.monotonic(), attempt.save is not None
        trains = trains or (now if attempt.training else 0.0)
        saved = saved or (now if last in list_checkpoints(RUN) else 0.0)
        if saving != (len(begins) > len(ends)):
            (begins if saving else ends).append(now)
    if attempt.code:
        raise RuntimeError(f"the unbroken run ended with {attempt.code}: {said()}")
    lasted = median(end - begin for begin, end in zip(begins, ends, strict=False))
    rhythm = median(later - sooner for sooner, later in pairwise(begins))
    return Times(trains - start, lasted, rhythm, time.monotonic() - saved)


@dataclass
class Killer:
    """Waits for the instant of a kill; returns early where the attempt has ended by itself."""

    chance: random.Random
    times: Times
    last: int
    """The last step of a run."""

    def anywhere(self, attempt: Attempt) -> None:
        """Any instant from the start on."""
        instant = time.monotonic() + self.chance.uniform(0, self.times.start_up + LIFE * self.times.between_saves)
        for _ in attempt.watch():
            if time.monotonic() >= instant:
                return

    def inside_a_save(self, attempt: Attempt, first: int | None = None) -> None:
        """While a save is under way, not always the first: after `first` others."""
        left, instant, before = self.chance.randrange(LIFE) if first is None else first, 0.0, None
        for _ in attempt.watch():
            now, save = time.monotonic(), attempt.save
            if save is not None and save != before:
                left, instant = left - 1, now + self.chance.uniform(0, self.times.save)
            if save is not None and left < 0 and now >= instant:
                return
            before = save

    def after_the_last_save(self, attempt: Attempt) -> None:
        """When all steps are saved and the process is about to end."""
        instant = 0.0
        for _ in attempt.watch():
            now = time.monotonic()
            if not instant and self.last in list_checkpoints(RUN):
                instant = now + self.chance.uniform(0, self.times.end)
            if instant and now >= instant:
                return
        self.times.end /= 2  # too late: aim earlier the next time

    def never(self, attempt: Attempt) -> None:
        """Let it finish."""
        for _ in attempt.watch():
            pass

    def plan(self, kills: int) -> list[Callable[[Attempt], None]]:
        """How each kill is aimed; the last leaves a checkpoint to resume from."""
        aimed, late = round(AIMED * kills), max(1, round(LATE * kills))
        plan: list[Callable[[Attempt], None]] = [self.inside_a_save] * (aimed - 1) + [self.after_the_last_save] * late
        plan += [self.anywhere] * (kills - aimed - late)
        self.chance.shuffle(plan)
        return [*plan, partial(self.inside_a_save, first=1)]


@dataclass
class Seen:
    """What came of the kills."""

    kills: int = 0
    inside: int = 0
    """Kills after which the folder of an unfinished save was there."""
    fresh: int = 0
    """Kills of processes that were not forked."""
    runs: int = 0
    """Runs that got to their end."""
    resumed: int = 0
    """Attempts that were seen to resume from a checkpoint."""
    newest: list[int] = field(default_factory=list)
    """The step of the newest checkpoint after each kill."""
    faults: list[str] = field(default_factory=list)

    def look(self, before: int, steps: list[int], at_risk: int) -> int:
        """After a kill: what counts as a checkpoint is whole, none is lost, and the run is known to be dead.

        The attempt went on from the newest checkpoint, and at most `at_risk` of its steps are lost.
        """
        found = list_checkpoints(RUN)
        newest = max(found, default=0)
        if newest < before:
            self.faults.append(f"kill {self.kills}: step {before} had a checkpoint; now there are {list(found)}")
        self.follow(before, steps)
        if steps and steps[-1] - newest > at_risk:
            self.faults.append(f"kill {self.kills}: step {steps[-1]} was done and the newest checkpoint is {newest}")
        for path in found.values():
            try:
                verify_checkpoint(path)
            except CheckpointError as error:
                self.faults.append(f"kill {self.kills}: {error}")
        if Endpoint.path(RUN).exists() and run_status(RUN) != "dead":
            self.faults.append(f"kill {self.kills}: the run passes for {run_status(RUN)}")
        self.newest.append(newest)
        return newest

    def follow(self, before: int, steps: list[int]) -> None:
        """An attempt does all steps after the checkpoint that it found, and no others."""
        if steps and steps != list(range(before + 1, steps[-1] + 1)):
            self.faults.append(f"after kill {self.kills}: the checkpoint was at {before}, and the steps were {steps}")
        self.resumed += bool(steps) and before > 0


def main() -> None:
    """Kill, look, begin again."""
    kills, chance = int(sys.argv[1]), random.Random(sys.argv[2])
    torch.set_num_threads(1)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a process with threads cannot fork itself safely")
    if SCRIPT:
        names = runpy.run_path(SCRIPT)
        last, at_risk = names["STEPS"], 2 * names["EVERY"]
    else:
        config = load_run_config(RECIPE)
        last, every = config.train.steps or 0, int(config.checkpoint.every or 0)
        # one save may be in flight until the next is due, which waits for it
        at_risk = 2 * every if config.checkpoint.asynchronous else every
    times = run_unbroken(last)
    RUN.rename("whole")
    killer, seen, newest = Killer(chance, times, last), Seen(), 0
    plan, fresh = killer.plan(kills), set(chance.sample(range(kills), max(1, round(FRESH * kills))))
    while seen.kills < kills or RUN.exists():
        attempt = Attempt(fresh=seen.kills in fresh)
        wait = plan[seen.kills] if seen.kills < kills else killer.never
        wait(attempt)
        attempt.kill()
        if attempt.code == -signal.SIGKILL:
            seen.inside += attempt.save is not None
            seen.fresh += seen.kills in fresh
            seen.kills += 1
            newest = seen.look(newest, attempt.steps, at_risk)
        elif attempt.code == 0:
            seen.follow(newest, attempt.steps)
            RUN.rename(f"broken-{seen.runs}")
            seen.runs, newest = seen.runs + 1, 0
        else:
            seen.faults.append(f"after kill {seen.kills}: exit code {attempt.code}: {said()}")
            break
    json.dump(asdict(seen) | asdict(times), sys.stdout)


if __name__ == "__main__":
    main()
