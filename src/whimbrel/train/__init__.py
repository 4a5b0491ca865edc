"""Training: the trainer and its arguments, callbacks and control; runs described by a TOML file.

Names are imported on first use, so that reading a run's log (`train.run_directory`) or controlling a run
(`train.control`) does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whimbrel.base import lazy_exports

if TYPE_CHECKING:
    from whimbrel.train.arguments import BaseTrainingArguments, MinimalTrainingArguments, TrainingArguments
    from whimbrel.train.build import SampleFunction
    from whimbrel.train.callback import StopRequest, TrainerCallback, TrainerControl, TrainerState, TrainOutput
    from whimbrel.train.distill import Distillation, precompute_teacher
    from whimbrel.train.evaluation import PredictionOutput
    from whimbrel.train.objectives import (
        LossOutput,
        Objective,
        logits_from_outputs,
        loss_and_logits_from_outputs,
        loss_from_outputs,
    )
    from whimbrel.train.preference import DPO, ORPO
    from whimbrel.train.run_config import RunConfig, load_run_config
    from whimbrel.train.run_directory import read_log
    from whimbrel.train.strategies import AccelTrainer, DDPTrainer, FSDPTrainer, PipelineTrainer
    from whimbrel.train.target_values import precompute_reference
    from whimbrel.train.trainer import BaseTrainer, Trainer, train

__all__ = [
    "DPO",
    "ORPO",
    "AccelTrainer",
    "BaseTrainer",
    "BaseTrainingArguments",
    "DDPTrainer",
    "Distillation",
    "FSDPTrainer",
    "LossOutput",
    "MinimalTrainingArguments",
    "Objective",
    "PipelineTrainer",
    "PredictionOutput",
    "RunConfig",
    "SampleFunction",
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
    "precompute_reference",
    "precompute_teacher",
    "read_log",
    "train",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "arguments": ["BaseTrainingArguments", "MinimalTrainingArguments", "TrainingArguments"],
        "build": ["SampleFunction"],
        "callback": ["StopRequest", "TrainOutput", "TrainerCallback", "TrainerControl", "TrainerState"],
        "run_config": ["RunConfig", "load_run_config"],
        "distill": ["Distillation", "precompute_teacher"],
        "evaluation": ["PredictionOutput"],
        "preference": ["DPO", "ORPO"],
        "run_directory": ["read_log"],
        "objectives": [
            "LossOutput",
            "Objective",
            "logits_from_outputs",
            "loss_and_logits_from_outputs",
            "loss_from_outputs",
        ],
        "strategies": ["AccelTrainer", "DDPTrainer", "FSDPTrainer", "PipelineTrainer"],
        "target_values": ["precompute_reference"],
        "trainer": ["BaseTrainer", "Trainer", "train"],
    },
)
