"""Exponential moving average of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from whimbrel.base.errors import CheckpointError
from whimbrel.checkpoint import pack, unpack
from whimbrel.train.callbacks import EmaCallback


def weights(run: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def means(callback: EmaCallback) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in callback.state_dict()["mean"].items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_average_follows_its_formula(make_run: Any) -> None:
    callback = EmaCallback(decay=0.75, every=2)
    run = make_run(callback).begin()
    expected = {name: value.double() for name, value in weights(run).items()}
    for step in range(1, 7):
        run.step()
        if step % 2 == 0:
            expected = {name: 0.75 * expected[name] + 0.25 * value.double() for name, value in weights(run).items()}
    for name, mean in means(callback).items():
        assert mean.dtype == torch.float32
        torch.testing.assert_close(mean.double(), expected[name], rtol=1e-6, atol=1e-6)


def test_a_resume_is_bit_exact(make_run: Any) -> None:
    uninterrupted = EmaCallback(decay=0.9)
    run = make_run(uninterrupted).begin()
    for _ in range(6):
        run.step()
    first = EmaCallback(decay=0.9)
    interrupted = make_run(first).begin()
    for _ in range(3):
        interrupted.step()
    state = unpack(*pack(first.state_dict()))  # serialized and deserialized as in a checkpoint
    state = {"mean": {name: tensor.clone() for name, tensor in state["mean"].items()}}
    second = EmaCallback(decay=0.9)
    second.load_state_dict(state)
    interrupted.callbacks.pop(first)
    interrupted.callbacks.add(second)
    interrupted.begin(3)
    for _ in range(3):
        interrupted.step()
    assert equal(means(second), means(uninterrupted))


def test_swapped_restores_the_weights_exactly(make_run: Any) -> None:
    callback = EmaCallback(decay=0.5)
    run = make_run(callback).begin()
    run.step()
    own, mean = weights(run), means(callback)
    assert not equal(own, mean)
    with pytest.raises(ZeroDivisionError), callback.average_parameters(run.model):
        assert equal(weights(run), mean)
        raise ZeroDivisionError
    assert equal(weights(run), own)


def test_half_precision_weights_are_averaged_in_fp32(make_run: Any) -> None:
    callback = EmaCallback(decay=0.999)
    run = make_run(callback)
    run.model.bfloat16()
    run.begin()
    start = means(callback)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(1.0)
    run.state.global_step = 1
    run.dispatch("on_step_end")
    for name, mean in means(callback).items():
        torch.testing.assert_close(mean, start[name].lerp(torch.ones_like(mean), 0.001), rtol=1e-6, atol=1e-6)
    with callback.average_parameters(run.model):
        assert {parameter.dtype for parameter in run.model.parameters()} == {torch.bfloat16}


def test_frozen_weights_are_not_averaged(make_run: Any) -> None:
    callback = EmaCallback(decay=0.5)
    run = make_run(callback)
    run.model[0].requires_grad_(False)
    run.begin()
    assert means(callback).keys() == {"2.weight", "2.bias"}


def test_the_average_is_saved_as_a_model_at_the_end(make_run: Any, tmp_path: Path) -> None:
    callback = EmaCallback(decay=0.5)
    run = make_run(callback).begin()
    run.step()
    run.step()
    own = weights(run)
    run.end()
    (target,) = run.saved_models
    assert target == tmp_path / "run" / "ema" / "step-00000002"
    assert equal(run.saved_models[target], means(callback))
    assert equal(weights(run), own)
    run.end()  # already saved: restarting a finished run writes nothing
    assert len(run.saved_models) == 1


def test_a_failed_run_saves_no_average(make_run: Any) -> None:
    run = make_run(EmaCallback(decay=0.5)).begin()
    run.step()
    run.fail()
    assert not run.saved_models


def test_the_average_of_another_model_raises_an_error(make_run: Any) -> None:
    callback = EmaCallback(decay=0.5)
    callback.load_state_dict({"mean": {"0.weight": torch.zeros(8, 4), "head": torch.zeros(1)}})
    with pytest.raises(CheckpointError, match="do not match this model .'0.bias'"):
        make_run(callback).begin()


def test_a_rollback_restores_the_average(make_run: Any) -> None:
    callback = EmaCallback(decay=0.5)
    run = make_run(callback).begin()
    run.step()
    then, state = means(callback), {"mean": means(callback)}
    run.step()
    callback.load_state_dict(state)
    run.dispatch("on_rollback", step=1)
    assert equal(means(callback), then)
