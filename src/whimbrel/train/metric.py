"""Which number of an evaluation says how good a model is, and which way is better."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from whimbrel.base.errors import ConfigError

__all__ = ["find_metric", "greater_is_better", "has_metric"]


def find_metric(metrics: Mapping[str, Any], name: str) -> float:
    """The metric as it is named, else with `eval_` before it."""
    for key in (name, f"eval_{name}"):
        if key in metrics:
            return float(metrics[key])
    raise ConfigError(f"the evaluation has no metric '{name}': it has {', '.join(sorted(metrics))}")


def has_metric(metrics: Container[str], name: str) -> bool:
    """Whether there is a metric with that name, with or without the `eval_` prefix."""
    return name in metrics or f"eval_{name}" in metrics


def greater_is_better(name: str, given: bool | None = None) -> bool:
    """As `given`; where it is not, a loss and a perplexity are better when they are smaller."""
    return given if given is not None else not any(word in name for word in ("loss", "perplexity"))
