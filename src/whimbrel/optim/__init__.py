"""Memory-efficient optimizers (GaLore family, Muon, low-bit AdamW), updates in backward, learning-rate schedules."""

from whimbrel.base.errors import NoSparseGradientError
from whimbrel.optim.backward import (
    OptimizerInBackward,
    ProjectInBackward,
    StepInBackward,
    project_in_backward,
    step_in_backward,
)
from whimbrel.optim.base import BaseOptimizer
from whimbrel.optim.build import (
    GroupConfig,
    OptimConfig,
    ParameterInfo,
    ParameterRow,
    Role,
    build_optimizer,
    classify_parameters,
    parameter_table,
    restore_optimizer,
    state_bytes,
)
from whimbrel.optim.galore import GaLore, GaLoreProjector
from whimbrel.optim.lowrank import AdamW8bit, Apollo, ApolloMini, Fira, GaLoreWarm, LDAdam, LowRankOptimizer, QGaLore
from whimbrel.optim.muon import Muon
from whimbrel.optim.schedules import Schedule, ScheduleConfig, lr_factor, resolve_steps

__all__ = [
    "AdamW8bit",
    "Apollo",
    "ApolloMini",
    "BaseOptimizer",
    "Fira",
    "GaLore",
    "GaLoreProjector",
    "GaLoreWarm",
    "GroupConfig",
    "LDAdam",
    "LowRankOptimizer",
    "Muon",
    "NoSparseGradientError",
    "OptimConfig",
    "OptimizerInBackward",
    "ParameterInfo",
    "ParameterRow",
    "ProjectInBackward",
    "QGaLore",
    "Role",
    "Schedule",
    "ScheduleConfig",
    "StepInBackward",
    "build_optimizer",
    "classify_parameters",
    "lr_factor",
    "parameter_table",
    "project_in_backward",
    "resolve_steps",
    "restore_optimizer",
    "state_bytes",
    "step_in_backward",
]
