"""Translation between `lr_scheduler_type` with its keywords, as in `transformers`, and `ScheduleConfig`."""

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
class _Type:
    """A transformers scheduler type: our name, implied settings, keyword names, and which keywords are required."""

    name: str
    sets: Mapping[str, Any] = field(default_factory=dict)
    keywords: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


FROM_ZERO = {"warmup_start": 0.0}
SCHEDULER_TYPES = {
    "linear": _Type("linear", FROM_ZERO),
    "cosine": _Type("cosine", FROM_ZERO, {"num_cycles": "cycles"}),
    "cosine_with_restarts": _Type("cosine_with_restarts", FROM_ZERO, {"num_cycles": "cycles"}),
    "cosine_with_min_lr": _Type(
        "cosine",
        FROM_ZERO,
        {"num_cycles": "cycles", "min_lr_rate": "min_lr_ratio", "min_lr": "min_lr_ratio"},
        needs=("min_lr", "min_lr_rate"),
    ),
    "polynomial": _Type("polynomial", FROM_ZERO, {"lr_end": "min_lr_ratio"}),
    "constant": _Type("constant"),
    "constant_with_warmup": _Type("constant", FROM_ZERO),
    "inverse_sqrt": _Type("inverse_sqrt", FROM_ZERO),
    "warmup_stable_decay": _Type(
        "wsd",
        {"warmup_start": 0.0, "cooldown_shape": "cosine"},
        {
            "num_decay_steps": "cooldown_steps",
            "num_stable_steps": "stable_steps",
            "warmup_type": "warmup_shape",
            "decay_type": "cooldown_shape",
            "num_cycles": "cycles",
        },
        needs=("num_decay_steps",),
    ),
    "wsd": _Type("wsd"),
}
"""The schedules of `transformers` that depend only on the step, and our wsd. Any setting of ScheduleConfig is a
keyword too; `warmup_start=None` starts the warm-up at 1/warmup_steps instead of 0."""

RATES = ("lr_end", "min_lr")
"""Keywords that are learning rates; the settings are factors of the peak."""
DEFAULT_LR_END = 1e-7
OPEN = {f.name for f in dataclasses.fields(ScheduleConfig)} - {"name", "warmup_steps"}


def schedule_settings(kind: str, keywords: Mapping[str, Any], warmup: int | float, lr: float) -> ScheduleConfig:
    """Translate `lr_scheduler_type`, `lr_scheduler_kwargs`, `warmup_steps` and `learning_rate` to our settings."""
    if kind not in SCHEDULER_TYPES:
        raise ConfigError(not_one_of("lr_scheduler_type", kind, SCHEDULER_TYPES))
    chosen = SCHEDULER_TYPES[kind]
    check_known("lr_scheduler_kwargs", keywords, {*chosen.keywords, *OPEN})
    if chosen.needs and not any(name in keywords for name in (*chosen.needs, "cooldown_steps", "min_lr_ratio")):
        raise ConfigError(f"lr_scheduler_type = {kind!r} needs {' or '.join(chosen.needs)} in lr_scheduler_kwargs")
    if kind == "constant" and warmup:
        raise ConfigError(
            f"warmup_steps = {warmup} has no effect with lr_scheduler_type = 'constant': use 'constant_with_warmup'"
        )
    settings: dict[str, Any] = {"name": chosen.name, "warmup_steps": warmup, **chosen.sets}
    if not warmup:
        settings.pop("warmup_start", None)
    if kind == "polynomial":
        keywords = {"lr_end": DEFAULT_LR_END} | dict(keywords) if "min_lr_ratio" not in keywords else keywords
    given: dict[str, str] = {}
    for keyword, value in keywords.items():
        setting = chosen.keywords.get(keyword, keyword)
        if setting in given:
            raise ConfigError(
                f"lr_scheduler_kwargs has {given[setting]} and {keyword}, which set the same value: leave one out"
            )
        given[setting] = keyword
        settings[setting] = value / lr if keyword in RATES and isinstance(value, int | float) and lr else value
    if kind == "warmup_stable_decay" and warmup and "warmup_start" not in keywords:
        settings["warmup_start"] = settings.get("min_lr_ratio", 0.0)
    try:
        return build(ScheduleConfig, settings, "schedule")
    except ConfigError as error:
        raise ConfigError(
            f"lr_scheduler_type = {kind!r} with lr_scheduler_kwargs = {dict(keywords)}: {error}"
        ) from error


def schedule_arguments(config: ScheduleConfig) -> tuple[str, dict[str, Any], int | float]:
    """The inverse: `lr_scheduler_type`, `lr_scheduler_kwargs` and `warmup_steps` for these settings."""
    kind = "constant_with_warmup" if config.name == "constant" and config.warmup_steps else str(config.name)
    sets = {f.name: f.default for f in dataclasses.fields(ScheduleConfig)} | dict(SCHEDULER_TYPES[kind].sets)
    if not config.warmup_steps:
        sets["warmup_start"] = None
    keywords = {name: getattr(config, name) for name in sorted(OPEN) if getattr(config, name) != sets[name]}
    if kind == "polynomial":
        keywords["min_lr_ratio"] = config.min_lr_ratio
    return kind, keywords, config.warmup_steps
