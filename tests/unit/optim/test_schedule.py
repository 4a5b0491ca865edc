"""The learning rate over a run."""

from __future__ import annotations

import pytest

from whimbrel.base.errors import ConfigError
from whimbrel.optim import ScheduleConfig, lr_factor


def curve(total: int = 10, **settings: object) -> list[float]:
    config = ScheduleConfig(**settings)  # type: ignore[arg-type]
    return [round(lr_factor(config, step, total), 6) for step in range(total)]


def test_constant() -> None:
    assert curve() == [1.0] * 10


def test_warm_up_reaches_the_peak_at_its_last_step() -> None:
    assert curve(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_to_the_floor_after_the_last_step() -> None:
    assert curve(name="linear") == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert curve(name="linear", floor=0.5)[5] == 0.75
    assert lr_factor(ScheduleConfig(name="linear", floor=0.1), 10, 10) == pytest.approx(0.1)


def test_cosine() -> None:
    values = curve(name="cosine", warmup_steps=2)
    assert values[2] == 1.0
    assert values[6] == pytest.approx(0.5)
    assert values == sorted(values[:2]) + sorted(values[2:], reverse=True)


def test_wsd_holds_then_falls() -> None:
    assert curve(name="wsd", cooldown=0.4) == [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert curve(name="wsd", cooldown=0.0) == [1.0] * 10


@pytest.mark.parametrize("settings", [{"warmup_steps": -1}, {"cooldown": 1.5}, {"floor": -0.1}])
def test_bad_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="schedule\\."):
        ScheduleConfig(**settings)  # type: ignore[arg-type]
