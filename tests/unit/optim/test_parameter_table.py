"""The parameter table: rules, learning rates and bytes of state."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

from whimbrel.models import GPT, GPTConfig
from whimbrel.optim import (
    GroupConfig,
    OptimConfig,
    build_optimizer,
    classify_parameters,
    parameter_table,
    project_in_backward,
    state_bytes,
)
from whimbrel.optim.build import OPTIONS_BY_OPTIMIZER

NAMES = get_args(get_type_hints(OptimConfig)["name"])
SHAPE = GPTConfig(context_length=16, vocab_size=64, num_layers=3, embd_size=32, num_heads=2)


def optimizer_of(name: str, model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    settings = {"rank": 8} | settings if "rank" in OPTIONS_BY_OPTIMIZER[name] else settings
    return build_optimizer(OptimConfig(name=name, lr=0.01, **settings), classify_parameters(model))  # type: ignore[arg-type]


def test_rows_group_parameters_that_differ_in_their_block_number() -> None:
    model = GPT(SHAPE)
    groups = (GroupConfig(pattern=r"\.1\.mlp\.c_fc\.weight", rank=4),)
    rows = parameter_table(model, optimizer_of("galore_warm", model, groups=groups, weight_decay=0.1))
    found = {(row.name, row.rule): (row.count, row.shape, row.lr, row.weight_decay) for row in rows}
    assert found["transformer.wte.weight", "adamw"] == (1, (128, 32), 0.01, 0.1)
    assert found["transformer.h.*.ln_1.weight", "adamw"] == (3, (32,), 0.01, 0.0)
    assert found["transformer.h.*.attn.c_attn.weight", "warm rank 8, adamw"] == (3, (96, 32), 0.01, 0.1)
    assert found["transformer.h.*.mlp.c_fc.weight", "warm rank 8, adamw"] == (2, (128, 32), 0.01, 0.1)
    assert found["transformer.h.*.mlp.c_fc.weight", "warm rank 4, adamw"] == (1, (128, 32), 0.01, 0.1)
    assert rows[0].name == "transformer.wte.weight"
    assert sum(row.count for row in rows) == len(list(model.parameters()))
    assert sum(row.weight_bytes for row in rows) == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_state_bytes_are_the_same_before_and_after_a_step_and_on_meta(name: str) -> None:
    model = GPT(SHAPE)
    with torch.device("meta"):
        ghost = GPT(SHAPE)
    optimizer = optimizer_of(name, model)
    before = parameter_table(model, optimizer)
    assert parameter_table(ghost, optimizer_of(name, ghost)) == before
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert parameter_table(model, optimizer) == before
    held = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert sum(row.state_bytes or 0 for row in before) == held > 0


def test_rules_have_readable_descriptions() -> None:
    model = nn.ModuleDict({"inner": nn.Linear(8, 6, bias=False)})

    def rule(name: str, **settings: Any) -> str:
        (row,) = parameter_table(model, optimizer_of(name, model, **settings))
        return row.rule

    assert rule("adamw") == "adamw"
    assert rule("muon") == "muon"
    assert rule("galore") == "svd rank 6, adamw"
    assert rule("galore", rank=2, projection_type="full") == "svd rank 2, adamw"
    assert rule("galore_warm", rank=2) == "warm rank 2, adamw"
    assert rule("fira", rank=2) == "svd rank 2, adamw, fira, left"


def test_any_optimizer_has_a_table() -> None:
    class Own(torch.optim.SGD):
        pass

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    foreign = nn.Parameter(torch.zeros(3))
    rows = parameter_table(model, Own([*model.parameters(), foreign], lr=0.5, momentum=0.9))
    assert [(row.name, row.count, row.rule, row.lr, row.state_bytes) for row in rows] == [
        ("*.weight", 2, "own", 0.5, None), ("*.bias", 2, "own", 0.5, None), ("(3,)", 1, "own", 0.5, None)
    ]  # fmt: skip


def test_wrapped_optimizer_has_the_same_table() -> None:
    model = GPT(SHAPE)
    optimizer = optimizer_of("galore_warm", model)
    before = parameter_table(model, optimizer), state_bytes(optimizer)
    projecting = project_in_backward(optimizer)  # type: ignore[arg-type]
    assert (parameter_table(model, projecting), state_bytes(projecting)) == before
