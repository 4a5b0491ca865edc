"""The callbacks that come with the trainer, one small file each."""

from whimbrel.train.callbacks.divergence import DivergenceCallback
from whimbrel.train.callbacks.early_stopping import EarlyStoppingCallback
from whimbrel.train.callbacks.ema import EmaCallback
from whimbrel.train.callbacks.memory import MemoryCallback
from whimbrel.train.callbacks.norms import NormsCallback
from whimbrel.train.callbacks.profiler import ProfilerCallback
from whimbrel.train.callbacks.progress import ProgressCallback
from whimbrel.train.callbacks.samples import SampleCallback
from whimbrel.train.callbacks.tensorboard import TensorBoardCallback
from whimbrel.train.callbacks.tracker import TrackerCallback
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
