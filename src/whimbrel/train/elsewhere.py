"""Arguments of `transformers` that are spelled otherwise here, and what is said to those who give them."""

from __future__ import annotations

import dataclasses
from typing import Any

from whimbrel.base.errors import ConfigError
from whimbrel.config import nearest

__all__ = ["CheckedNames"]

ELSEWHERE = {
    "bf16": "mixed_precision='bf16'",
    "eval_accumulation_steps": "nothing: evaluation keeps sums, not logits",
    "fp16": "mixed_precision='fp16'",
    "greater_is_better": "best_model_greater_is_better",
    "load_best_model_at_end": "preserve_best_model, which keeps the best checkpoint",
    "metric_for_best_model": "best_model_metric",
    "no_cuda": "use_cpu",
    "optim": "optimizers=(NAME, None) of the trainer",
    "optim_args": "optimizers=(OptimConfig(name=NAME, ...), None) of the trainer",
    "optim_target_modules": "optimizers=(OptimConfig(name=NAME, groups=(GroupConfig(...),)), None) of the trainer",
    "report_to": "callbacks=[...] of the trainer, from whimbrel.train.callbacks",
    "tf32": "float32_matmul_precision='high'",
    "warmup_ratio": "warmup_steps, which below 1 is a share of the run",
}
"""What to give instead."""


class CheckedNames(type):
    """Makes classes that refuse an unknown argument by name, with what to give instead."""

    def __call__(cls, *args: Any, **named: Any) -> Any:
        """Construct, once every name is known."""
        known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
        for name in (name for name in named if name not in known):
            if name in ELSEWHERE:
                raise ConfigError(f"{cls.__name__} has no argument '{name}': use {ELSEWHERE[name]}")
            near = nearest(name, known)
            hint = near if "?" in near else ": leave it out (docs/trainer.md lists what there is)"
            raise ConfigError(f"{cls.__name__} has no argument '{name}'{hint}")
        return super().__call__(*args, **named)
