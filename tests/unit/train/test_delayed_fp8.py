"""Runs with `fp8_recipe = delayed`, on a CPU with the references of the kernels: exact resume, refused settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.callbacks import InterruptAt

from whimbrel.base.errors import ConfigError, PrecisionError
from whimbrel.models import GPT
from whimbrel.models import gpt as gpt_module
from whimbrel.ops import fp8 as fp8_module
from whimbrel.precision import recipes
from whimbrel.train import RunConfig, Trainer, TrainerCallback

Make = Callable[..., Any]
SIZE = {"model__bias": "all", "model__embd_size": 64, "train__steps": 6, "checkpoint__every": 2}
FP8 = {"train__fp8_recipe": "delayed", "train__precision": "bf16"}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks with the references of the kernels, and delayed scales from the fourth micro-batch on."""

    def prepare_on_cpu(model: GPT, *_: Any) -> None:
        model.set_delayed_fp8(enabled=True)

    monkeypatch.setattr(recipes, "_prepare_delayed", prepare_on_cpu)
    monkeypatch.setattr(gpt_module, "can_fuse", lambda *_: torch.is_grad_enabled())
    monkeypatch.setattr(fp8_module, "HISTORY", 3)


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.hex: list[str] = []

    def on_train_metrics(self, **event: Any) -> None:
        self.hex.append(event["metrics"]["loss"].hex())


def losses_of(config: RunConfig, *callbacks: Any) -> tuple[Trainer, list[str]]:
    losses = Losses()
    trainer = Trainer.from_config(config, callbacks=[losses, *callbacks])
    trainer.train()
    return trainer, losses.hex


@pytest.mark.usefixtures("on_cpu")
def test_a_killed_run_resumes_bit_identically(make_run: Make, tmp_path: Path) -> None:
    uninterrupted, reference = losses_of(make_run(**SIZE, **FP8, output_dir=tmp_path / "uninterrupted"))
    interrupted = make_run(**SIZE, **FP8, output_dir=tmp_path / "interrupted")
    with pytest.raises(KeyboardInterrupt):
        losses_of(interrupted, InterruptAt(3))
    resumed, last = losses_of(interrupted)
    assert resumed.resumed_from is not None
    assert resumed.resumed_from.name == "step-00000002"
    assert last == reference[2:]
    models = [trainer.unwrapped_model() for trainer in (uninterrupted, resumed)]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
    # Different scales would hardly change the losses, since they are powers of two.
    states = [model.fp8.state_dict() for model in models]  # type: ignore[union-attr, operator]
    assert states[0]["micro_batches"] == states[1]["micro_batches"] == 12
    assert all(torch.equal(states[0][name], states[1][name]) for name in ("history", "amax"))


@pytest.mark.usefixtures("on_cpu")
def test_the_loss_is_that_of_bf16(make_run: Make, tmp_path: Path) -> None:
    settings = SIZE | {"train__steps": 20, "checkpoint__every": 20}
    _, losses = losses_of(make_run(**settings, **FP8))
    bf16 = {"train__precision": "bf16", "output_dir": tmp_path / "bf16"}
    _, expected = losses_of(make_run(**settings, **bf16))
    values, expected_values = ([float.fromhex(x) for x in run] for run in (losses, expected))
    assert values != expected_values
    torch.testing.assert_close(torch.tensor(values), torch.tensor(expected_values), rtol=5e-3, atol=0)
    assert values[-1] < values[0] - 0.1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"train__precision": "fp32"}, "train.precision = fp32: use bf16"),
        ({"train__recompute": "full"}, "train.recompute = full: remove it"),
        ({"train__compile": True, "train__compile_scope": "model"}, "train.compile settings than the defaults"),
        ({"train__compile": True, "train__compile_mode": "max-autotune"}, "train.compile settings than the defaults"),
    ],
)
def test_incompatible_settings_are_refused(make_run: Make, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"delayed does not work with .*{expected}"):
        Trainer.from_config(make_run(**SIZE, **FP8 | settings)).train()


def test_a_cpu_is_refused(make_run: Make) -> None:
    with pytest.raises(PrecisionError, match="fp8_recipe = delayed is not supported on cpu"):
        Trainer.from_config(make_run(**SIZE, **FP8)).train()
