"""Training: the trainer and its arguments, callbacks and control; runs described by a TOML file.

Names are imported on first use, so that reading a run's log (`train.log`) or controlling a run (`train.control`)
does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whimbrel.train.arguments import BaseTrainingArguments, MinimalTrainingArguments, TrainingArguments
    from whimbrel.train.build import Sampler
    from whimbrel.train.callback import StopRequest, TrainerCallback
    from whimbrel.train.config import RunConfig, load_run_config
    from whimbrel.train.evaluation import Prediction
    from whimbrel.train.log import read_log
    from whimbrel.train.objectives import (
        LossOutput,
        Objective,
        logits_from_outputs,
        loss_and_logits_from_outputs,
        loss_from_outputs,
    )
    from whimbrel.train.state import TrainerControl, TrainerState, TrainOutput
    from whimbrel.train.trainer import BaseTrainer, Trainer, train

__all__ = [
    "BaseTrainer",
    "BaseTrainingArguments",
    "LossOutput",
    "MinimalTrainingArguments",
    "Objective",
    "Prediction",
    "RunConfig",
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
    "LossOutput": "whimbrel.train.objectives",
    "MinimalTrainingArguments": "whimbrel.train.arguments",
    "Objective": "whimbrel.train.objectives",
    "Prediction": "whimbrel.train.evaluation",
    "RunConfig": "whimbrel.train.config",
    "Sampler": "whimbrel.train.build",
    "StopRequest": "whimbrel.train.callback",
    "TrainOutput": "whimbrel.train.state",
    "Trainer": "whimbrel.train.trainer",
    "TrainerCallback": "whimbrel.train.callback",
    "TrainerControl": "whimbrel.train.state",
    "TrainerState": "whimbrel.train.state",
    "TrainingArguments": "whimbrel.train.arguments",
    "load_run_config": "whimbrel.train.config",
    "logits_from_outputs": "whimbrel.train.objectives",
    "loss_and_logits_from_outputs": "whimbrel.train.objectives",
    "loss_from_outputs": "whimbrel.train.objectives",
    "read_log": "whimbrel.train.log",
    "train": "whimbrel.train.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'whimbrel.train' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
