"""Optimizers and schedules: AdamW from torch, Muon, and the learning rate over a run."""

from whimbrel.optim.build import build_optimizer, restore_optimizer
from whimbrel.optim.config import OptimConfig, ScheduleConfig
from whimbrel.optim.muon import Muon
from whimbrel.optim.routing import Role, RoutedParameter
from whimbrel.optim.schedule import Schedule, lr_factor, whole_steps

__all__ = [
    "Muon",
    "OptimConfig",
    "Role",
    "RoutedParameter",
    "Schedule",
    "ScheduleConfig",
    "build_optimizer",
    "lr_factor",
    "restore_optimizer",
    "whole_steps",
]
