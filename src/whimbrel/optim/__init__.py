"""Optimizers in little memory, each a choice of subspace, rule, lift and store; and the learning rate over a run."""

from whimbrel.base.errors import NoSparseGradientError
from whimbrel.optim.build import build_optimizer, restore_optimizer
from whimbrel.optim.careful import Careful
from whimbrel.optim.composed import Composed
from whimbrel.optim.config import GroupConfig, OptimConfig, ScheduleConfig
from whimbrel.optim.galore import GaLore
from whimbrel.optim.in_backward import InBackward, StepInBackward, step_in_backward
from whimbrel.optim.muon import Muon
from whimbrel.optim.presets import AdamW8bit, Apollo, ApolloMini, Fira, GaLoreWarm, LDAdam, QGaLore
from whimbrel.optim.project import ProjectInBackward, project_in_backward
from whimbrel.optim.projector import GaLoreProjector
from whimbrel.optim.replicas import check_replicas
from whimbrel.optim.routing import Role, RoutedParameter, route_parameters
from whimbrel.optim.schedule import Schedule, lr_factor, whole_steps
from whimbrel.optim.table import ParameterRow, parameter_table, state_bytes

__all__ = [
    "AdamW8bit",
    "Apollo",
    "ApolloMini",
    "Careful",
    "Composed",
    "Fira",
    "GaLore",
    "GaLoreProjector",
    "GaLoreWarm",
    "GroupConfig",
    "InBackward",
    "LDAdam",
    "Muon",
    "NoSparseGradientError",
    "OptimConfig",
    "ParameterRow",
    "ProjectInBackward",
    "QGaLore",
    "Role",
    "RoutedParameter",
    "Schedule",
    "ScheduleConfig",
    "StepInBackward",
    "build_optimizer",
    "check_replicas",
    "lr_factor",
    "parameter_table",
    "project_in_backward",
    "restore_optimizer",
    "route_parameters",
    "state_bytes",
    "step_in_backward",
    "whole_steps",
]
