"""Where the time of a few steps goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from whimbrel.base.files import PARTIAL
from whimbrel.train.callback import TrainerCallback

__all__ = ["ProfilerCallback"]


class ProfilerCallback(TrainerCallback):
    """Records the steps from `first` to before `end` into `trace-FIRST-END.json.gz`, which Perfetto and Chrome open."""

    def __init__(self, first: int, end: int) -> None:
        self._first = first
        self._end = end
        self._profile: profile | None = None

    def on_step_begin(self, **event: Any) -> None:
        """Begin where it is due; a run that goes on in between records what is left."""
        state = event["state"]
        if self._profile is None and self._first <= state.global_step < self._end and state.is_world_process_zero:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile = profile(activities=kinds)
            self._profile.start()

    def on_step_end(self, **event: Any) -> None:
        """Write after the last of the steps."""
        if event["state"].global_step >= self._end:
            self._finish(event["trainer"].config.output_dir)

    def on_train_end(self, **event: Any) -> None:
        """Write what there is of a run that ended sooner."""
        self._finish(event["trainer"].config.output_dir)

    def _finish(self, output_dir: Path) -> None:
        if self._profile is not None:
            own, self._profile = self._profile, None
            own.stop()
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            target = Path(output_dir) / f"trace-{self._first}-{self._end}.json.gz"
            partial = target.with_name(f"{PARTIAL}{target.name}")
            own.export_chrome_trace(str(partial))
            os.replace(partial, target)
