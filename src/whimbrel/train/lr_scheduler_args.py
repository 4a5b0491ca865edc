"""Translate between `lr_scheduler_type` and `lr_scheduler_kwargs` (as in transformers) and `ScheduleConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whimbrel.base.errors import ConfigError
from whimbrel.config import build, check_known, not_one_of
from whimbrel.optim import ScheduleConfig

__all__ = ["SCHEDULER_TYPES", "schedule_arguments", "schedule_settings"]


@dataclass(frozen=True, slots=True)
class _SchedulerType:
    """A transformers scheduler type: our name, implied settings, kwarg names, and which kwargs are required."""

    name: str
    implied: Mapping[str, Any] = field(default_factory=dict)
    keyword_map: Mapping[str, str] = field(default_factory=dict)
    requires_one_of: tuple[str, ...] = ()


FROM_ZERO = {"warmup_start": 0.0}
SCHEDULER_TYPES = {
    "linear": _SchedulerType("linear", FROM_ZERO),
    "cosine": _SchedulerType("cosine", FROM_ZERO, {"num_cycles": "cycles"}),
    "cosine_with_restarts": _SchedulerType("cosine_with_restarts", FROM_ZERO, {"num_cycles": "cycles"}),
    "cosine_with_min_lr": _SchedulerType(
        "cosine",
        FROM_ZERO,
        {"num_cycles": "cycles", "min_lr_rate": "min_lr_ratio", "min_lr": "min_lr_ratio"},
        requires_one_of=("min_lr", "min_lr_rate"),
    ),
    "polynomial": _SchedulerType("polynomial", FROM_ZERO, {"lr_end": "min_lr_ratio"}),
    "constant": _SchedulerType("constant"),
    "constant_with_warmup": _SchedulerType("constant", FROM_ZERO),
    "inverse_sqrt": _SchedulerType("inverse_sqrt", FROM_ZERO),
    "warmup_stable_decay": _SchedulerType(
        "wsd",
        {"warmup_start": 0.0, "cooldown_shape": "cosine"},
        {
            "num_decay_steps": "cooldown_steps",
            "num_stable_steps": "stable_steps",
            "warmup_type": "warmup_shape",
            "decay_type": "cooldown_shape",
            "num_cycles": "cycles",
        },
        requires_one_of=("num_decay_steps",),
    ),
    "wsd": _SchedulerType("wsd"),
}
"""The schedules of `transformers` that depend only on the step, and our wsd. Any setting of ScheduleConfig is a
keyword too; `warmup_start=None` starts the warmup at 1/warmup_steps instead of 0."""

ABSOLUTE_LR_KWARGS = ("lr_end", "min_lr")
"""Keywords that are learning rates; the settings are factors of the peak."""
DEFAULT_LR_END = 1e-7
SCHEDULE_KWARGS = {f.name for f in dataclasses.fields(ScheduleConfig)} - {"name", "warmup_steps"}


def schedule_settings(kind: str, kwargs: Mapping[str, Any], warmup: int | float, lr: float) -> ScheduleConfig:
    """Translate `lr_scheduler_type`, `lr_scheduler_kwargs`, `warmup_steps` and `learning_rate` to our settings."""
    if kind not in SCHEDULER_TYPES:
        raise ConfigError(not_one_of("lr_scheduler_type", kind, SCHEDULER_TYPES))
    chosen = SCHEDULER_TYPES[kind]
    check_known("lr_scheduler_kwargs", kwargs, {*chosen.keyword_map, *SCHEDULE_KWARGS})
    required = {setting for name in chosen.requires_one_of for setting in (name, chosen.keyword_map[name])}
    if required.isdisjoint(kwargs) and required:
        raise ConfigError(
            f"lr_scheduler_type = {kind!r} needs {' or '.join(chosen.requires_one_of)} in lr_scheduler_kwargs"
        )
    if kind == "constant" and warmup:
        raise ConfigError(
            f"warmup_steps = {warmup} has no effect with lr_scheduler_type = 'constant': use 'constant_with_warmup'"
        )
    settings: dict[str, Any] = {"name": chosen.name, "warmup_steps": warmup, **chosen.implied}
    if not warmup:
        settings.pop("warmup_start", None)
    if kind == "polynomial":
        kwargs = {"lr_end": DEFAULT_LR_END} | dict(kwargs) if "min_lr_ratio" not in kwargs else kwargs
    set_by: dict[str, str] = {}
    for keyword, value in kwargs.items():
        setting = chosen.keyword_map.get(keyword, keyword)
        if setting in set_by:
            raise ConfigError(
                f"lr_scheduler_kwargs has {set_by[setting]} and {keyword}, which set the same value: remove one"
            )
        set_by[setting] = keyword
        settings[setting] = (
            value / lr if keyword in ABSOLUTE_LR_KWARGS and isinstance(value, int | float) and lr else value
        )
    if kind == "warmup_stable_decay" and warmup and "warmup_start" not in kwargs:
        settings["warmup_start"] = settings.get("min_lr_ratio", 0.0)
    try:
        return build(ScheduleConfig, settings, "schedule")
    except ConfigError as error:
        raise ConfigError(f"lr_scheduler_type = {kind!r} with lr_scheduler_kwargs = {dict(kwargs)}: {error}") from error


def schedule_arguments(config: ScheduleConfig) -> tuple[str, dict[str, Any], int | float]:
    """The inverse: `lr_scheduler_type`, `lr_scheduler_kwargs` and `warmup_steps` for these settings."""
    kind = "constant_with_warmup" if config.name == "constant" and config.warmup_steps else str(config.name)
    defaults = {f.name: f.default for f in dataclasses.fields(ScheduleConfig)} | dict(SCHEDULER_TYPES[kind].implied)
    if not config.warmup_steps:
        defaults["warmup_start"] = None
    kwargs = {
        name: getattr(config, name) for name in sorted(SCHEDULE_KWARGS) if getattr(config, name) != defaults[name]
    }
    if kind == "polynomial":
        kwargs["min_lr_ratio"] = config.min_lr_ratio
    return kind, kwargs, config.warmup_steps
