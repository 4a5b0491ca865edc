"""The memory estimate before a run matches the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from whimbrel.models import GPT
from whimbrel.optim import GaLoreWarm, project_in_backward, step_in_backward
from whimbrel.optim.muon import Muon
from whimbrel.train import RunConfig, TrainerCallback, train
from whimbrel.train.callbacks.progress import estimate_memory


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda params: torch.optim.AdamW(params, fused=True),
        torch.optim.SGD,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        Muon,
        lambda params: Muon([{"params": list(params), "rule": "adam"}]),
    ],
)
def test_the_memory_estimate_matches_the_first_step(make: Callable[[Any], torch.optim.Optimizer]):
    model = nn.Linear(64, 32, bias=False)
    optimizer = make(model.parameters())
    before = estimate_memory(model, optimizer)
    assert not optimizer.state
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    assert estimate_memory(model, optimizer) == before
    held = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert (before.weights, before.gradients, before.optimizer) == (8192, 8192, held)


def test_frozen_parameters_have_no_gradients_and_buffers_count_as_weights():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    model[0].requires_grad_(False)
    memory = estimate_memory(model, torch.optim.SGD(model.parameters()))
    assert (memory.weights, memory.gradients, memory.optimizer) == (256 + 4 * 32 + 8, 64, 0)


def test_the_state_of_an_unknown_optimizer_is_not_estimated():
    class Own(torch.optim.AdamW):
        pass

    model = nn.Linear(4, 4)
    assert estimate_memory(model, Own(model.parameters())).optimizer is None


def test_gradients_freed_in_backward_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16))
    whole = sum(p.numel() * 4 for p in model.parameters())
    plain = GaLoreWarm(model.parameters(), rank=4)
    assert estimate_memory(model, plain).gradients == whole
    projecting = project_in_backward(plain)
    assert estimate_memory(model, projecting).gradients == 4 * (64 * 4 + 64 + 16 * 4 + 16)
    projecting.remove()
    assert estimate_memory(model, step_in_backward(plain)).gradients == 64 * 32 * 4


def test_padding_rows_of_the_vocabulary_are_not_parameters(make_run: Callable[..., RunConfig]) -> None:
    seen = []

    class Look(TrainerCallback):
        def on_train_begin(self, **event: Any) -> None:
            seen.append((event["summary"].parameters, event["summary"].frozen_parameters))

    config = make_run(train__steps=1)
    assert config.model.padded_vocab_size > config.model.vocab_size
    train(config, callbacks=[Look()])
    assert seen == [(GPT(config.model).num_parameters(), 0)]
