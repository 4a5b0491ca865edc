"""Training: the trainer and its arguments, callbacks and control; runs described by a TOML file."""

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
