"""The callbacks that come with the trainer."""

from whimbrel.train.callbacks.loggers import TensorBoardCallback, TrackerCallback
from whimbrel.train.callbacks.monitors import (
    DivergenceCallback,
    EarlyStoppingCallback,
    EmaCallback,
    MemoryCallback,
    NormsCallback,
    ProfilerCallback,
    SampleCallback,
)
from whimbrel.train.callbacks.progress import ProgressCallback
from whimbrel.train.control import ControlCallback

__all__ = [
    "ControlCallback",
    "DivergenceCallback",
    "EarlyStoppingCallback",
    "EmaCallback",
    "MemoryCallback",
    "NormsCallback",
    "ProfilerCallback",
    "ProgressCallback",
    "SampleCallback",
    "TensorBoardCallback",
    "TrackerCallback",
]
