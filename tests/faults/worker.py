"""`whimbrel` with faults: `echo KIND > fault-RANK` in the working directory raises, or fills the disk, on that rank."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from pathlib import Path
from typing import Any

from whimbrel.base.errors import TrainingError
from whimbrel.cli.main import main
from whimbrel.distributed import launch
from whimbrel.train.callback import TrainerCallback
from whimbrel.train.trainer import Trainer

FAIL_FROM, ALL_WRITES = 3, 1 | 2 | 4
FULL_STEPS = 25
"""How long the disk stays full: at least two saves."""
STEP_SECONDS = 0.05
"""Delays steps, so that a test can break the run between two of them."""


class Faults(TrainerCallback):
    """Injects the fault that the test asks for, before the next step of this rank."""

    all_ranks = True

    def __init__(self) -> None:
        self._file = Path(f"fault-{os.environ.get('RANK', '0')}")
        self._full_until: int | None = None

    def on_step_begin(self, **event: Any) -> None:
        time.sleep(STEP_SECONDS)
        step = event["state"].global_step
        if self._full_until is not None and step >= self._full_until:
            ctypes.CDLL(None).fault_disarm()
            self._full_until = None
        if not self._file.exists():
            return
        kind = self._file.read_text().strip()
        self._file.unlink()
        if kind == "raise":
            raise TrainingError("an injected error")
        folder = os.fsencode(Path(event["trainer"].config.output_dir).resolve())
        ctypes.CDLL(None).fault_arm(folder, ctypes.c_long(1), FAIL_FROM, errno.ENOSPC, ALL_WRITES)
        self._full_until = step + FULL_STEPS


if __name__ == "__main__":
    launch.COMMAND = (__file__,)
    defaults = Trainer.default_callbacks
    Trainer.default_callbacks = classmethod(lambda cls: [*defaults(), Faults()])  # type: ignore[method-assign, assignment]
    main()
