"""A run: its configuration, its parts, the loop, and those who look on."""

from whimbrel.train.config import RunConfig, load_run_config
from whimbrel.train.loop import Loop, Position
from whimbrel.train.run import Sampler, train
from whimbrel.train.watch import RunResult, RunSummary, StepRecord, Watcher, read_log

__all__ = [
    "Loop",
    "Position",
    "RunConfig",
    "RunResult",
    "RunSummary",
    "Sampler",
    "StepRecord",
    "Watcher",
    "load_run_config",
    "read_log",
    "train",
]
