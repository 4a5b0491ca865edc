"""Training: the trainer and its arguments, callbacks and control; runs described by a TOML file.

Names are imported on first use, so that reading a run's log (`train.log`) or controlling a run (`train.control`)
does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whimbrel.train.arguments import BaseTrainingArguments, MinimalTrainingArguments, TrainingArguments
    from whimbrel.train.callback import StopRequest, TrainerCallback
    from whimbrel.train.config import RunConfig, load_run_config
    from whimbrel.train.evaluation import Prediction
    from whimbrel.train.log import read_log
    from whimbrel.train.outputs import logits_from_outputs, loss_and_logits_from_outputs, loss_from_outputs
    from whimbrel.train.run import RunTrainer, Sampler, train
    from whimbrel.train.state import TrainerControl, TrainerState, TrainOutput
    from whimbrel.train.trainer import BaseTrainer, Trainer

__all__ = [
    "BaseTrainer",
    "BaseTrainingArguments",
    "MinimalTrainingArguments",
    "Prediction",
    "RunConfig",
    "RunTrainer",
    "Sampler",
    "StopRequest",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "load_run_config",
    "logits_from_outputs",
    "loss_and_logits_from_outputs",
    "loss_from_outputs",
    "read_log",
    "train",
]

_MODULES = {
    "BaseTrainer": "whimbrel.train.trainer",
    "BaseTrainingArguments": "whimbrel.train.arguments",
    "MinimalTrainingArguments": "whimbrel.train.arguments",
    "Prediction": "whimbrel.train.evaluation",
    "RunConfig": "whimbrel.train.config",
    "RunTrainer": "whimbrel.train.run",
    "Sampler": "whimbrel.train.run",
    "StopRequest": "whimbrel.train.callback",
    "TrainOutput": "whimbrel.train.state",
    "Trainer": "whimbrel.train.trainer",
    "TrainerCallback": "whimbrel.train.callback",
    "TrainerControl": "whimbrel.train.state",
    "TrainerState": "whimbrel.train.state",
    "TrainingArguments": "whimbrel.train.arguments",
    "load_run_config": "whimbrel.train.config",
    "logits_from_outputs": "whimbrel.train.outputs",
    "loss_and_logits_from_outputs": "whimbrel.train.outputs",
    "loss_from_outputs": "whimbrel.train.outputs",
    "read_log": "whimbrel.train.log",
    "train": "whimbrel.train.run",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'whimbrel.train' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
