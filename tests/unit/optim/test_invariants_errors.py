"""Invariants of every optimizer: typos and invalid values are rejected with one line."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.optim.optimizer_cases import CASES, LOW_RANK, differences, parameters, random, run_steps, snapshot
from torch import nn

from whimbrel.base.errors import OptimizerError
from whimbrel.optim import LowRankOptimizer

BAD: dict[str, list[Any]] = {
    "lr": [-1e-3, math.nan, math.inf, "1e-3", None],
    "weight_decay": [-0.1, math.nan, None],
    "eps": [-1e-8, math.nan],
    "betas": [(-0.1, 0.9), (0.9, 1.0), (0.9,), 0.9],
    "rank": [0, -4, 2.5, True, "4"],
    "gap": [0, 1.5, None],
    "scale": [-1.0, math.nan, None],
    "seed": [-1, 0.5],
}
"""Invalid values of common options."""
GALORE = {"gap": "update_proj_gap"}
"""Options that GaLore names differently."""


def cases() -> list[tuple[str, str, Any]]:
    """Each optimizer with each invalid value of each of its options."""
    found = []
    for name, entry in CASES.items():
        if name in ("muon", "normuon"):  # see test_muon.py
            continue
        known = entry([nn.Parameter(random((8, 6)))]).defaults
        for setting, values in BAD.items():
            key = GALORE.get(setting, setting) if name == "galore" else setting
            if key not in known or (key == "eps" and known.get("rule", "adamw") != "adamw"):
                continue
            found += [(name, key, value) for value in values if not (name == "galore" and value is True)]
    return found


@pytest.mark.parametrize("name", CASES)
def test_misspelled_keyword_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match="wieght_decay"):
        CASES[name]([nn.Parameter(random((8, 6)))], wieght_decay=0.1)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("muon", "normuon")])
def test_misspelled_group_option_is_rejected_with_a_suggestion(name: str) -> None:
    group = {"params": [nn.Parameter(random((8, 6)))], "wieght_decay": 0.1}
    with pytest.raises(OptimizerError, match="wieght_decay.*did you mean 'weight_decay'"):
        CASES[name]([group])


@pytest.mark.parametrize(("name", "key", "value"), cases())
def test_invalid_value_is_rejected_by_name(name: str, key: str, value: object) -> None:
    """In a parameter group."""
    with pytest.raises(OptimizerError, match=rf"^{key}: expected .* got") as caught:
        CASES[name]([{"params": [nn.Parameter(random((8, 6)))], key: value}])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LOW_RANK)
def test_rejected_group_changes_nothing(name: str) -> None:
    optimizer = LOW_RANK[name](parameters())
    run_steps(optimizer, range(2))
    before, groups = snapshot(optimizer), len(optimizer.param_groups)
    for group in ({"lr": -1.0}, {"wieght_decay": 0.1}, {"params": [torch.zeros(3, 3, dtype=torch.complex64)]}):
        with pytest.raises(OptimizerError):
            optimizer.add_param_group({"params": [nn.Parameter(random((8, 6)))]} | group)
    assert len(optimizer.param_groups) == groups
    assert differences(before, snapshot(optimizer)) == []
    run_steps(optimizer, range(2, 4))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("muon", "normuon")])
@pytest.mark.parametrize("rank", [1, 3, 200])
def test_changing_the_rank_of_a_group_is_rejected(name: str, rank: int) -> None:
    """The state is allocated for the first rank."""
    optimizer = CASES[name](parameters())
    run_steps(optimizer, range(2))
    before, first = snapshot(optimizer), optimizer.param_groups[0]["rank"]
    if first == rank:
        pytest.skip("this is its rank")
    optimizer.param_groups[0]["rank"] = rank
    with pytest.raises(OptimizerError, match=f"expected rank = {first}.* got {rank}") as caught:
        run_steps(optimizer, range(2, 3))
    assert "\n" not in str(caught.value)
    assert differences(before, snapshot(optimizer)) == []
    optimizer.param_groups[0]["rank"] = first
    run_steps(optimizer, range(2, 3))
    assert differences(before, snapshot(optimizer)) != []


CHOICES = {
    "subspace": "power",
    "rule": "adam",
    "back_projection": "forward",
    "store": "int4",
    "basis_store": "int2",
    "side": "both",
    "moment_transfer": "throw",
    "start": "svd",
}


@pytest.mark.parametrize("key", CHOICES)
def test_unknown_choice_is_rejected_with_the_choices(key: str) -> None:
    with pytest.raises(OptimizerError, match=f"^{key}: expected one of .* got '{CHOICES[key]}'"):
        LowRankOptimizer([nn.Parameter(random((8, 6)))], rank=2, **{key: CHOICES[key]})


CONTRADICTIONS: list[tuple[str, dict[str, Any]]] = [
    ("eps = 1e-08 has no effect with rule = 'sgd'", {"rule": "sgd", "eps": 1e-8}),
    ("momentum = 0.9 has no effect with rule = 'adamw'", {"rule": "adamw", "momentum": 0.9}),
    ("betas = .* has no effect with rule = 'muon'", {"rule": "muon", "betas": (0.9, 0.99)}),
    ("moment_transfer = 'both' requires", {"rule": "adafactor", "moment_transfer": "both"}),
    ("moment_transfer = 'both' requires", {"subspace": "random", "moment_transfer": "both"}),
    ("error_feedback requires", {"error_feedback": True, "back_projection": "fira"}),
    ("lazy = True has no effect", {"subspace": "random", "moment_transfer": "keep", "lazy": True}),
    ("back_projection = 'fira' requires", {"subspace": "random", "moment_transfer": "keep", "back_projection": "fira"}),
]


@pytest.mark.parametrize(("message", "settings"), CONTRADICTIONS)
def test_contradicting_options_are_rejected(message: str, settings: dict[str, Any]) -> None:
    with pytest.raises(OptimizerError, match=f"^{message}"):
        LowRankOptimizer([nn.Parameter(random((8, 6)))], rank=2, **settings)


def test_weight_that_cannot_be_viewed_as_a_matrix_is_rejected() -> None:
    with pytest.raises(OptimizerError, match=r"contiguous\(\)"):
        LowRankOptimizer([nn.Parameter(random((4, 6, 3, 3)).transpose(0, 1))], rank=2)
