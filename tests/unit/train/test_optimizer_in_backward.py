"""`train.optimizer_in_backward` with low-rank optimizers: projecting gradients in backward changes no result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from whimbrel.base.errors import ConfigError
from whimbrel.optim import ProjectInBackward
from whimbrel.train import RunConfig, Trainer, TrainerCallback, train

MakeRun = Callable[..., RunConfig]
WARM = {"optim__name": "galore_warm", "optim__rank": 4, "optim__gap": 3, "optim__start": "random", "train__clip": 0.5}


class Losses(TrainerCallback):
    """Records every loss; stops after the given number of steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.values: list[float] = []
        self.stop_after = stop_after

    def on_step_end(self, **event: Any) -> None:
        event["control"].should_training_stop = event["state"].global_step == self.stop_after

    def on_train_metrics(self, **event: Any) -> None:
        self.values.append(event["metrics"]["loss"])


def losses(config: RunConfig, stop_after: int | None = None) -> list[float]:
    callback = Losses(stop_after)
    train(config, callbacks=[callback])
    return callback.values


def test_one_micro_batch_per_step_is_bit_identical(make_run: MakeRun, tmp_path: Path) -> None:
    settings = {**WARM, "train__micro_batch": 8, "train__clip": None}
    plain = losses(make_run(**settings))
    assert losses(make_run(**settings, train__optimizer_in_backward=True, output_dir=tmp_path / "b")) == plain


@pytest.mark.parametrize("linears", [False, True])
def test_accumulated_projections_train_like_accumulated_gradients(
    make_run: MakeRun, tmp_path: Path, linears: bool
) -> None:
    settings = {**WARM, "train__micro_batch": 2, "train__clip": None}
    plain = losses(make_run(**settings))
    settings |= {"train__optimizer_in_backward": True, "train__projected_linears": linears}
    assert losses(make_run(**settings, output_dir=tmp_path / "b")) == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("linears", [False, True])
def test_resume_is_bit_identical(make_run: MakeRun, tmp_path: Path, linears: bool, weights: str | None) -> None:
    settings = {**WARM, "train__optimizer_in_backward": True, "train__projected_linears": linears}
    settings["train__weight_dtype"] = weights
    uninterrupted = losses(make_run(**settings))
    assert uninterrupted[-1] < uninterrupted[0]
    config = make_run(**settings, output_dir=tmp_path / "b")
    assert losses(config, stop_after=3) + losses(config) == uninterrupted


def test_first_bases_are_random_by_default(make_run: MakeRun, tmp_path: Path) -> None:
    for given, expected in ((None, "random"), ("gradient", "gradient")):
        settings = WARM | {"optim__start": given, "train__optimizer_in_backward": True}
        trainer = Trainer.from_config(make_run(**settings, output_dir=tmp_path / expected))
        trainer.train()
        assert isinstance(trainer.optimizer, ProjectInBackward)
        assert {group["start"] for group in trainer.optimizer.param_groups} == {expected}


# Both warnings come from torch during tracing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_blocks_project_gradients(make_run: MakeRun, tmp_path: Path) -> None:
    settings = {**WARM, "train__optimizer_in_backward": True, "train__projected_linears": True}
    compiled = {"train__compile": True, "train__compile_backend": "aot_eager"}
    torch._dynamo.reset()
    plain = losses(make_run(**settings))
    assert losses(make_run(**settings, **compiled, output_dir=tmp_path / "b")) == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optim__name": "apollo", "train__clip": 1.0}, "does not work with train.clip = 1.0"),
        (
            {"train__projected_linears": True},
            "does not work with train.projected_linears, as AdamW needs full gradients",
        ),
        ({**WARM, "train__precision": "fp16"}, "does not work with train.precision = fp16"),
    ],
)
def test_incompatible_settings_raise(make_run: MakeRun, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(make_run(**given, train__micro_batch=8, train__optimizer_in_backward=True))


def test_projected_linears_need_optimizer_in_backward(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match="train.projected_linears = True needs train.optimizer_in_backward = true"):
        make_run(**WARM, train__projected_linears=True)
