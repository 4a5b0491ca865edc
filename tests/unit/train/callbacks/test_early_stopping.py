"""Early stopping."""

from __future__ import annotations

import math
from typing import Any

import pytest

from whimbrel.base.errors import ConfigError
from whimbrel.train.callbacks import EarlyStoppingCallback


def evaluations_until_stop(
    make_run: Any, callback: EarlyStoppingCallback, name: str, values: list[float]
) -> int | None:
    run = make_run(callback).begin()
    for count, value in enumerate(values, start=1):
        run.step(loss=1.0)
        run.evaluate(**{name: value})
        if run.control.should_training_stop:
            assert run.callbacks.stopped_by.kind == "stop"
            return count
    return None


@pytest.mark.parametrize(
    ("settings", "name", "values", "stops"),
    [
        ({"patience": 2}, "loss", [3, 2, 2.5, 1, 1.5, 1.25], 6),
        ({"patience": 2}, "loss", [5, 4, 3, 2, 1], None),
        ({"patience": 1, "threshold": 0.5}, "loss", [3, 2.6], 2),
        ({"patience": 1, "threshold": 0.25}, "loss", [3, 2.5], None),
        ({"patience": 1, "metric": "accuracy"}, "accuracy", [0.0, 0.1, 0.2, 0.2], 4),
        ({"patience": 1, "metric": "eval_accuracy"}, "accuracy", [0.5, 0.25], 2),
        ({"patience": 1, "metric": "error", "greater_is_better": False}, "error", [0.5, 0.25, 0.3], 3),
        ({"patience": 1, "metric": "perplexity"}, "perplexity", [9, 8, 8.5], 3),
        ({"patience": 1}, "loss", [0.5, 0.0, -0.5, 0.0], 4),  # 0.0 is a metric
        ({"patience": 2}, "loss", [1, math.nan, math.nan], 3),
        ({"patience": 2}, "loss", [math.nan, 3, 2, 1], None),
        ({"patience": 2}, "loss", [math.nan, 3, math.nan, 3], 4),
        ({"patience": 2}, "loss", [math.nan, math.nan], 2),
        ({"patience": 2, "metric": "accuracy"}, "accuracy", [math.nan, 0.1, 0.2, 0.3], None),
    ],
)
def test_the_run_stops_after_patience_evaluations_without_improvement(
    make_run: Any, settings: dict[str, Any], name: str, values: list[float], stops: int | None
) -> None:
    assert evaluations_until_stop(make_run, EarlyStoppingCallback(**settings), name, values) == stops


def test_a_resume_restores_the_patience(make_run: Any) -> None:
    first = EarlyStoppingCallback(patience=3)
    assert evaluations_until_stop(make_run, first, "loss", [0.0, 1, 1]) is None
    second = EarlyStoppingCallback(patience=3)
    second.load_state_dict(first.state_dict())
    assert evaluations_until_stop(make_run, second, "loss", [1]) == 1


def test_the_reason_names_nan_metrics(make_run: Any) -> None:
    callback = EarlyStoppingCallback(patience=2)
    assert evaluations_until_stop(make_run, callback, "loss", [math.nan, math.nan]) == 2
    assert callback.reason == "loss was NaN in all 2 evaluations"


def test_an_unknown_metric_raises_an_error(make_run: Any) -> None:
    with pytest.raises(ConfigError, match="unknown metric 'bleu'.*eval_loss"):
        evaluations_until_stop(make_run, EarlyStoppingCallback(patience=1, metric="bleu"), "loss", [1.0])
