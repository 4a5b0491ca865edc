"""Learning-rate schedules."""

from __future__ import annotations

import pytest
import torch

from whimbrel.base.errors import ConfigError
from whimbrel.optim import Schedule, ScheduleConfig, lr_factor, resolve_steps


def curve(total: int = 10, **settings: object) -> list[float]:
    config = ScheduleConfig(**settings)  # type: ignore[arg-type]
    return [round(lr_factor(config, step, total), 6) for step in range(total)]


def test_constant_factor_is_one() -> None:
    assert curve() == [1.0] * 10


def test_warm_up_reaches_the_peak_at_its_last_step() -> None:
    assert curve(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_reaches_min_lr_ratio_after_the_last_step() -> None:
    assert curve(name="linear") == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert curve(name="linear", min_lr_ratio=0.5)[5] == 0.75
    assert lr_factor(ScheduleConfig(name="linear", min_lr_ratio=0.1), 10, 10) == pytest.approx(0.1)


def test_cosine_falls_to_min_lr_ratio() -> None:
    values = curve(name="cosine", warmup_steps=2)
    assert values[2] == 1.0
    assert values[6] == pytest.approx(0.5)
    assert values == sorted(values[:2]) + sorted(values[2:], reverse=True)


def test_wsd_is_constant_then_decays() -> None:
    assert curve(name="wsd", cooldown=0.4) == [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert curve(name="wsd", cooldown=0.0) == [1.0] * 10


def test_warm_up_as_a_fraction_and_from_a_start() -> None:
    assert curve(warmup_steps=0.35) == curve(warmup_steps=4)
    assert curve(warmup_steps=4, warmup_start=0.0)[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert curve(warmup_steps=2, warmup_start=0.5, warmup_shape="cosine")[:3] == [0.5, 0.75, 1.0]


def test_cooldown_by_steps_and_shape() -> None:
    assert curve(name="wsd", cooldown_steps=4) == curve(name="wsd", cooldown=0.4)
    assert curve(name="wsd", cooldown_steps=4, cooldown_shape="1-sqrt")[8] == pytest.approx(1 - 0.5**0.5, abs=1e-6)
    assert curve(name="wsd", cooldown_steps=2, stable_steps=3, min_lr_ratio=0.1)[2:7] == [1, 1, 0.55, 0.1, 0.1]


def test_resolve_steps() -> None:
    assert (resolve_steps(7, 100), resolve_steps(0.031, 100)) == (7, 4)


def test_schedule_scales_the_peak_lr_of_each_group() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (1.0, 3.0)]
    groups[1]["peak_lr"] = 0.3
    optimizer = torch.optim.SGD(groups)
    schedule = Schedule(optimizer, lambda step: 1 / (step + 1))
    assert schedule.get_last_lr() == [1.0, 0.3]
    schedule.step()
    assert schedule.get_last_lr() == [0.5, 0.15]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.15]


def test_schedule_resumes() -> None:
    def make() -> Schedule:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        return Schedule(optimizer, lambda step: lr_factor(ScheduleConfig(name="cosine"), step, 10))

    schedule, other = make(), make()
    for _ in range(4):
        schedule.step()
    assert schedule.state_dict() == {"step": 4}
    other.load_state_dict(schedule.state_dict())
    assert other.get_last_lr() == schedule.get_last_lr() == [0.1 * lr_factor(ScheduleConfig(name="cosine"), 4, 10)]


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": -1},
        {"warmup_steps": 1.5},
        {"cooldown": 1.5},
        {"min_lr_ratio": -0.1},
        {"warmup_start": 2.0},
        {"warmup_shape": "cosine"},
        {"power": 2.0},
        {"name": "linear", "cooldown_steps": 3},
        {"name": "wsd", "stable_steps": 3},
        {"name": "wsd", "cycles": 1.0},
        {"name": "inverse_sqrt", "timescale": 0},
        {"min_lr_ratio": 0.5},
        {"name": "inverse_sqrt", "min_lr_ratio": 0.5},
        {"name": "cosine", "cooldown": 0.5},
        {"name": "cosine", "warmup_start": 0.5},
        {"name": "wsd", "cooldown": 0.5, "cooldown_steps": 3},
    ],
)
def test_invalid_options_are_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="schedule\\."):
        ScheduleConfig(**settings)  # type: ignore[arg-type]


def test_cooldown_and_cooldown_steps_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"cooldown and schedule\.cooldown_steps are mutually exclusive"):
        ScheduleConfig(name="wsd", cooldown=0.5, cooldown_steps=3)
