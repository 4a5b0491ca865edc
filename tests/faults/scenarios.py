"""One fault-injection scenario, run as `python scenarios.py SCENARIO FOLDER` with the shim preloaded; prints JSON.

For each n, a forked child saves a checkpoint while the shim kills or fails its n-th system call. The parent then checks
what is left on disk.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import whimbrel
from whimbrel.base.errors import WriteError
from whimbrel.checkpoint import (
    CheckpointManager,
    RNGState,
    SharingPattern,
    StateComponent,
    list_checkpoints,
    verify_checkpoint,
)
from whimbrel.checkpoint import manager as manager_module
from whimbrel.model_io import load_weights
from whimbrel.models import GPT, GPTConfig

COUNT, KILL, FAIL_ONCE, FAIL_FROM = range(4)
DATA, SYNC, NAME, REMOVE = 1, 2, 4, 8
EVERY = DATA | SYNC | NAME | REMOVE

shim = ctypes.CDLL(None)
shim.fault_trace.restype = ctypes.c_char_p
shim.fault_calls.restype = ctypes.c_long


def arm(folder: Path, at: int, action: int, code: int = 0, kinds: int = EVERY) -> None:
    shim.fault_arm(str(folder).encode(), ctypes.c_long(at), action, code, kinds)


class Model:
    """A GPT, saved as a model directory."""

    def __init__(self, value: float) -> None:
        shape = GPTConfig(context_length=8, vocab_size=60, num_layers=1, embd_size=8, num_heads=1)
        self.model = GPT(shape).requires_grad_(False)
        for parameter in self.model.parameters():
            parameter.fill_(value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(state, strict=False)

    def save_directory(self, state: dict[str, torch.Tensor], folder: Path) -> None:
        whimbrel.save_model(self.model, folder, state=state)

    def load_directory(self, folder: Path) -> None:
        load_weights(self.model, folder)


class Values:
    """Any other stateful object."""

    def __init__(self, value: float) -> None:
        self.state: Any = {"m": torch.full((500,), value), "value": value}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def make_components(value: float) -> list[StateComponent]:
    return [
        StateComponent("model", Model(value), SharingPattern.GLOBAL),
        StateComponent("optimizer", Values(value), SharingPattern.GLOBAL),
        StateComponent("trainer", Values(value), SharingPattern.GLOBAL),
        StateComponent("rng", RNGState(), SharingPattern.PER_RANK),
    ]


def value_of(components: list[StateComponent]) -> float:
    """The value that all components have in common."""
    model, optimizer, trainer, _ = (component.stateful.state_dict() for component in components)
    found = {float(v) for state in (model, optimizer, trainer) for v in _numbers(state)}
    if len(found) != 1:
        raise ValueError(f"a mixture of {found}")
    return found.pop()


def _numbers(state: dict[str, Any]) -> Iterator[float]:
    for name, value in state.items():
        rows = 60 if name in ("transformer.wte.weight", "lm_head.weight") else None  # the rest is padding
        yield from value[:rows].flatten().unique().tolist() if isinstance(value, torch.Tensor) else [value]


def prepare(run: Path, *, damaged: bool) -> None:
    """Write checkpoints 1 and 2, and optionally a damaged 3."""
    manager = CheckpointManager(run)
    for step in (1, 2, 3) if damaged else (1, 2):
        manager.save(step, make_components(float(step)))
    if damaged:
        (run / "checkpoints" / "step-00000003" / "trainer.json").write_text("{}")


def save(run: Path, *, asynchronous: bool) -> None:
    """Resume from the newest valid checkpoint and save step 3."""
    manager = CheckpointManager(run, keep=2, asynchronous=asynchronous)
    manager.load(make_components(0.0))
    manager.save(3, make_components(30.0))
    manager.wait()
    manager.close()


def check(run: Path, allowed: set[float]) -> str | None:
    """Check what is left and that the next save succeeds. Returns an error message, or None."""
    manager, components = CheckpointManager(run, keep=2), make_components(0.0)
    manager.load(components)
    if value_of(components) not in allowed:
        return f"loaded the state {value_of(components)}"
    manager.save(4, make_components(40.0))
    left = sorted(os.listdir(run / "checkpoints"))
    if left not in (["step-00000002", "step-00000004"], ["step-00000003", "step-00000004"]):
        return f"the next save left {left}"
    for path in list_checkpoints(run).values():
        verify_checkpoint(path)
    return None


def points(base: Path, operation: Callable[[Path], None], kinds: int = EVERY) -> Iterator[tuple[int, Path]]:
    """Yield the index of every system call of `operation`, each with a fresh copy of the run."""
    run = base.with_name("work")
    shutil.copytree(base, run)
    arm(run, 0, COUNT, kinds=kinds)
    operation(run)
    total = shim.fault_calls()
    shim.fault_disarm()
    for at in range(1, total + 1):
        shutil.rmtree(run)
        shutil.copytree(base, run)
        yield at, run
    shutil.rmtree(run)


def killed(base: Path, *, asynchronous: bool) -> Iterator[str | None]:
    """SIGKILL at the n-th call."""

    def save_checkpoint(run: Path) -> None:
        save(run, asynchronous=asynchronous)

    for at, run in points(base, save_checkpoint):
        child = os.fork()
        if child == 0:
            arm(run, at, KILL)
            save_checkpoint(run)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            yield f"call {at}: not killed but {status}"
            continue
        yield _error(f"killed at call {at}", run, {2.0, 30.0})


def failing(base: Path, action: int, code: int, kinds: int) -> Iterator[str | None]:
    """Fail the n-th call once, so that a retry succeeds, or every call from the n-th on, so that the save fails."""

    def save_checkpoint(run: Path) -> None:
        save(run, asynchronous=False)

    for at, run in points(base, save_checkpoint, kinds):
        what = f"{errno.errorcode[code]} {'at' if action == FAIL_ONCE else 'from'} call {at}"
        arm(run, at, action, code, kinds)
        try:
            save_checkpoint(run)
        except WriteError as error:
            shim.fault_disarm()
            if action == FAIL_ONCE:
                yield f"{what}: not retried: {error}"
                continue
            if "\n" in str(error) or ".partial" in str(error) or os.strerror(code) not in str(error):
                yield f"{what}: reported as {error}"
                continue
        shim.fault_disarm()
        yield _error(what, run, {30.0} if action == FAIL_ONCE else {2.0, 30.0})


def _error(what: str, run: Path, allowed: set[float]) -> str | None:
    try:
        fault = check(run, allowed)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    return None if fault is None else f"{what}: {fault}"


def trace(base: Path) -> Iterator[str | None]:
    """The system calls of one save, in order."""
    arm(base, 0, COUNT)
    save(base, asynchronous=False)
    shim.fault_disarm()
    yield from shim.fault_trace().decode().splitlines()


SCENARIOS: dict[str, Callable[[Path], Iterator[str | None]]] = {
    "killed": lambda base: killed(base, asynchronous=False),
    "killed during async save": lambda base: killed(base, asynchronous=True),
    "killed with a damaged checkpoint": lambda base: killed(base, asynchronous=False),
    "full disk once": lambda base: failing(base, FAIL_ONCE, errno.ENOSPC, DATA | SYNC | NAME),
    "full disk": lambda base: failing(base, FAIL_FROM, errno.ENOSPC, DATA | SYNC | NAME),
    "io error once": lambda base: failing(base, FAIL_ONCE, errno.EIO, EVERY),
    "io error": lambda base: failing(base, FAIL_FROM, errno.EIO, EVERY),
    "trace": trace,
}


def main() -> None:
    """Run one scenario and print the error message of each point, or null, as JSON."""
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    manager_module.RETRY_DELAYS = (0.0, 0.0)
    base = folder / "base"
    prepare(base, damaged="damaged" in scenario)
    json.dump(list(SCENARIOS[scenario](base)), sys.stdout)


if __name__ == "__main__":
    main()
