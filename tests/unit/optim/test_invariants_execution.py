"""The table of optimizers x invariants: together or apart, compiled or not, at once or in pieces, steps agree."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from tests.unit.optim.table import COMPOSED, ENTRIES, everything, move, parameters, params_of, random
from torch import nn

from whimbrel.optim import composed

COMPILED = ["galore", "adamw8bit", "galore_warm", "apollo", "muon", "adafactor, int8"]
"""Some of each kind, since a compilation takes seconds."""


@pytest.fixture
def quiet_compiler() -> Iterator[None]:
    """The compiler logs where it leaves a part to Python: how many steps were made is known there."""
    torch._dynamo.reset()
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", COMPOSED)
def test_many_at_once_equal_one_by_one(name: str) -> None:
    together, apart = (COMPOSED[name](parameters(), foreach=foreach) for foreach in (True, False))
    move(together, range(8))
    move(apart, range(8))
    for key, value in everything(together).items():
        torch.testing.assert_close(everything(apart)[key], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_step_equals_an_eager_one(name: str, quiet_compiler: None) -> None:
    eager, compiled = (ENTRIES[name]([nn.Parameter(random((72, 60)))]) for _ in range(2))
    step = torch.compile(compiled.step, backend="aot_eager")
    for seed in range(2):
        for optimizer in (eager, compiled):
            params_of(optimizer)[0].grad = random((72, 60), seed + 1)
        eager.step()
        step()
    for key, value in everything(eager).items():
        torch.testing.assert_close(everything(compiled)[key], value, atol=1e-6, rtol=1e-5)


def test_a_step_compiled_to_machine_code_equals_an_eager_one(quiet_compiler: None) -> None:
    eager, compiled = (COMPOSED["adamw, bf16"]([nn.Parameter(random((72, 60)))], store="fp32") for _ in range(2))
    step = torch.compile(compiled.step)
    for optimizer in (eager, compiled):
        params_of(optimizer)[0].grad = random((72, 60), 1)
    eager.step()
    step()
    for key, value in everything(eager).items():
        torch.testing.assert_close(everything(compiled)[key], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", COMPOSED)
def test_large_parameters_are_worked_on_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows at a time; what is rounded by chance is rounded by other numbers, and so agrees less."""
    whole, cut = (COMPOSED[name](parameters()) for _ in range(2))
    move(whole, range(8))
    monkeypatch.setattr(composed, "AT_ONCE", 100)
    move(cut, range(8))
    plain = whole.defaults["store"] == "fp32"
    for a, b in zip(params_of(whole), params_of(cut), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 if plain else 0.03, rtol=1e-4)
