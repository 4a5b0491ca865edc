"""Divergence detection on converging and diverging losses."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from whimbrel.train.callbacks import DivergenceCallback
from whimbrel.train.config import DivergenceConfig
from whimbrel.train.run_directory import read_log


def losses_of_training(lr: float, steps: int = 300) -> list[float]:
    """Losses of a small classifier trained by SGD with batches of 4: decreasing and very noisy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    rule = torch.randn(8, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 8)
        loss = nn.functional.cross_entropy(model(x), (x @ rule).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


GOOD = losses_of_training(lr=0.1)
BAD = GOOD[:100] + losses_of_training(lr=30.0)[:200]  # the learning rate is raised after 100 steps


def step_of_detection(make_run: Any, callback: DivergenceCallback, losses: list[float]) -> int | None:
    """The index of the loss after which the run stops, or None."""
    run = make_run(callback, steps=len(losses)).begin()
    for step, loss in enumerate(losses):
        run.step(loss=loss)
        if run.control.should_stop:
            return step
    return None


DETECTORS = [
    pytest.param({"threshold": 1.0}, id="ema"),
    pytest.param({"detector": "window", "threshold": 1.0, "window": 10}, id="window"),
]


@pytest.mark.parametrize("settings", DETECTORS)
def test_a_noisy_decreasing_loss_is_not_divergence(make_run: Any, settings: dict[str, Any]) -> None:
    assert sum(GOOD[-50:]) < 0.7 * sum(GOOD[:50])
    rises = [later - now for now, later in itertools.pairwise(GOOD)]
    assert max(rises) > 1.0  # single steps often rise by more than the threshold
    assert step_of_detection(make_run, DivergenceCallback(DivergenceConfig(action="stop", **settings)), GOOD) is None


@pytest.mark.parametrize("settings", DETECTORS)
def test_the_first_steps_are_not_divergence(make_run: Any, settings: dict[str, Any]) -> None:
    start = [11.0, 11.4, 10.9, 11.3, 10.6, 9.9, 9.1, 8.8, 9.3, 8.1, 8.4, 7.7]
    assert step_of_detection(make_run, DivergenceCallback(DivergenceConfig(action="stop", **settings)), start) is None


@pytest.mark.parametrize("settings", DETECTORS)
def test_a_diverging_loss_is_detected_within_a_few_steps(make_run: Any, settings: dict[str, Any]) -> None:
    callback = DivergenceCallback(DivergenceConfig(action="abort", **settings))
    step = step_of_detection(make_run, callback, BAD)
    assert step is not None
    assert 100 <= step < 120
    assert callback.reason is not None
    assert f"at step {step}" in callback.reason


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("settings", DETECTORS)
def test_a_non_finite_loss_is_divergence_at_once(make_run: Any, settings: dict[str, Any], loss: float) -> None:
    callback = DivergenceCallback(DivergenceConfig(action="stop", **settings))
    assert step_of_detection(make_run, callback, [loss]) == 0
    assert callback.reason == f"the loss of step 0 is {loss}"


@pytest.mark.parametrize("settings", DETECTORS)
def test_a_resume_does_not_change_detection(make_run: Any, settings: dict[str, Any]) -> None:
    config = DivergenceConfig(action="stop", **settings)
    uninterrupted = step_of_detection(make_run, DivergenceCallback(config), BAD)
    first, second = DivergenceCallback(config), DivergenceCallback(config)
    assert step_of_detection(make_run, first, BAD[:95]) is None
    second.load_state_dict(first.state_dict())
    assert step_of_detection(make_run, second, BAD[95:]) == (uninterrupted or 0) - 95


@pytest.mark.parametrize(("action", "kind"), [("stop", "stop"), ("abort", "abort")])
def test_the_action_stops_or_aborts(make_run: Any, action: Any, kind: str) -> None:
    run = make_run(DivergenceCallback(DivergenceConfig(action=action))).begin()
    run.step(loss=math.nan)
    assert run.callbacks.stopped_by == ("DivergenceCallback", "on_train_metrics", kind)


def test_detection_is_off_without_an_action(make_run: Any) -> None:
    assert step_of_detection(make_run, DivergenceCallback(DivergenceConfig()), [math.nan]) is None


@pytest.mark.parametrize("detector", ["ema", "window"])
@pytest.mark.parametrize("name", ["gpt2-baseline-20m", "gpt2-fast-20m"])
def test_published_runs_are_not_divergence(make_run: Any, root: Path, name: str, detector: Any) -> None:
    """One of them spikes from 5 to 10.6 and recovers."""
    lines = read_log(root / "bench" / "results" / f"{name}.jsonl")
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert (
        step_of_detection(make_run, DivergenceCallback(DivergenceConfig(action="stop", detector=detector)), losses)
        is None
    )
    ruined = losses + [losses[-1] + 6.0] * 20
    assert (
        step_of_detection(make_run, DivergenceCallback(DivergenceConfig(action="stop", detector=detector)), ruined)
        is not None
    )
