"""The table of optimizers x invariants: typos and values that cannot be meant are refused, in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.optim.optimizer_cases import ENTRIES, LOW_RANK, differences, everything, move, parameters, random
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
"""Values of settings that most have."""
GALORE = {"gap": "update_proj_gap"}
"""What the reference calls them."""


def cases() -> list[tuple[str, str, Any]]:
    """Each optimizer with each bad value of each setting that it listens to."""
    found = []
    for name, entry in ENTRIES.items():
        if name == "muon":  # its own tests have its own
            continue
        known = entry([nn.Parameter(random((8, 6)))]).defaults
        for setting, values in BAD.items():
            key = GALORE.get(setting, setting) if name == "galore" else setting
            if key not in known or (key == "eps" and known.get("rule", "adamw") != "adamw"):
                continue
            found += [(name, key, value) for value in values if not (name == "galore" and value is True)]
    return found


@pytest.mark.parametrize("name", ENTRIES)
def test_a_misspelt_keyword_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match="wieght_decay"):
        ENTRIES[name]([nn.Parameter(random((8, 6)))], wieght_decay=0.1)


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "muon"])
def test_a_misspelt_key_of_a_group_is_refused_with_the_nearest(name: str) -> None:
    group = {"params": [nn.Parameter(random((8, 6)))], "wieght_decay": 0.1}
    with pytest.raises(OptimizerError, match="wieght_decay.*did you mean 'weight_decay'"):
        ENTRIES[name]([group])


@pytest.mark.parametrize(("name", "key", "value"), cases())
def test_a_bad_value_is_refused_by_name(name: str, key: str, value: object) -> None:
    """In a group, whose setting need not be a keyword of the preset."""
    with pytest.raises(OptimizerError, match=rf"^{key}: expected .* got") as caught:
        ENTRIES[name]([{"params": [nn.Parameter(random((8, 6)))], key: value}])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LOW_RANK)
def test_a_refused_group_leaves_nothing_behind(name: str) -> None:
    optimizer = LOW_RANK[name](parameters())
    move(optimizer, range(2))
    before, groups = everything(optimizer), len(optimizer.param_groups)
    for group in ({"lr": -1.0}, {"wieght_decay": 0.1}, {"params": [torch.zeros(3, 3, dtype=torch.complex64)]}):
        with pytest.raises(OptimizerError):
            optimizer.add_param_group({"params": [nn.Parameter(random((8, 6)))]} | group)
    assert len(optimizer.param_groups) == groups
    assert differences(before, everything(optimizer)) == []
    move(optimizer, range(2, 4))


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "muon"])
@pytest.mark.parametrize("rank", [1, 3, 200])
def test_changing_the_rank_of_a_live_group_is_refused(name: str, rank: int) -> None:
    """The state is allocated for the first rank."""
    optimizer = ENTRIES[name](parameters())
    move(optimizer, range(2))
    before, first = everything(optimizer), optimizer.param_groups[0]["rank"]
    if first == rank:
        pytest.skip("this is its rank")
    optimizer.param_groups[0]["rank"] = rank
    with pytest.raises(OptimizerError, match=f"expected rank = {first}.* got {rank}") as caught:
        move(optimizer, range(2, 3))
    assert "\n" not in str(caught.value)
    assert differences(before, everything(optimizer)) == []
    optimizer.param_groups[0]["rank"] = first
    move(optimizer, range(2, 3))
    assert differences(before, everything(optimizer)) != []


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
def test_an_unknown_choice_is_refused_with_those_there_are(key: str) -> None:
    with pytest.raises(OptimizerError, match=f"^{key} = '{CHOICES[key]}' is not one of "):
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
def test_choices_that_contradict_each_other_are_refused(message: str, settings: dict[str, Any]) -> None:
    with pytest.raises(OptimizerError, match=f"^{message}"):
        LowRankOptimizer([nn.Parameter(random((8, 6)))], rank=2, **settings)


def test_a_weight_that_is_no_matrix_in_memory_is_refused() -> None:
    with pytest.raises(OptimizerError, match=r"contiguous\(\)"):
        LowRankOptimizer([nn.Parameter(random((4, 6, 3, 3)).transpose(0, 1))], rank=2)
