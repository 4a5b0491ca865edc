"""Invariants of every optimizer: state is tensors of known size, and resumes bit for bit."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.optim.optimizer_cases import (
    CASES,
    LOW_RANK,
    SHAPES,
    differences,
    parameters,
    params_of,
    random,
    run_steps,
    snapshot,
)
from torch import Tensor, nn

from whimbrel.base.errors import OptimizerError
from whimbrel.checkpoint import pack, unpack
from whimbrel.optim import LowRankOptimizer, restore_optimizer

every = pytest.mark.parametrize("name", CASES)
every_low_rank = pytest.mark.parametrize("name", LOW_RANK)


def torch_round_trip(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def checkpoint_round_trip(state: Any) -> Any:
    tensors, tree = pack(state)
    return unpack({name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(tree)))


def restart(name: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A new optimizer over copies of the parameters."""
    return CASES[name]([nn.Parameter(p.detach().clone()) for p in params_of(optimizer)])


@every
@pytest.mark.parametrize(
    ("round_trip", "dtype"), [(torch_round_trip, torch.float32), (checkpoint_round_trip, torch.bfloat16)]
)
def test_resume_is_bit_identical(name: str, round_trip: Callable[[Any], Any], dtype: torch.dtype) -> None:
    """There are refreshes before and after the resume."""
    uninterrupted = CASES[name](parameters(dtype))
    run_steps(uninterrupted, range(4))
    resumed = restart(name, uninterrupted)
    resumed.load_state_dict(round_trip(uninterrupted.state_dict()))
    assert differences(snapshot(uninterrupted), snapshot(resumed)) == []
    run_steps(uninterrupted, range(4, 13))
    run_steps(resumed, range(4, 13))
    assert differences(snapshot(uninterrupted), snapshot(resumed)) == []


@every
def test_restore_optimizer_matches_parameters_by_name(name: str) -> None:
    """Into groups in another order, which keep their learning rate."""

    def build(order: list[int], params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        optimizer = CASES[name]([params[i] for i in order], lr=lr)
        places = {id(p): i for i, p in enumerate(params)}
        for group in optimizer.param_groups:
            group["names"] = [str(places[id(p)]) for p in group["params"]]
        return optimizer

    params = parameters()
    first = build([0, 1, 2, 3, 4, 5, 6], params, 0.01)
    run_steps(first, range(3))
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    second = build([2, 1, 0, 6, 5, 4, 3], copies, 0.005)
    restore_optimizer(second, torch_round_trip(first.state_dict()))
    assert second.param_groups[0]["lr"] == 0.005
    for p, q in zip(params, copies, strict=True):
        assert differences(first.state[p], second.state[q]) == []


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_load_keeps_dtypes(name: str, dtype: torch.dtype) -> None:
    optimizer = CASES[name](parameters(dtype))
    run_steps(optimizer, range(2))
    before = [{key: t.dtype for key, t in optimizer.state[p].items()} for p in params_of(optimizer)]
    optimizer.load_state_dict(torch_round_trip(optimizer.state_dict()))
    after = [{key: t.dtype for key, t in optimizer.state[p].items()} for p in params_of(optimizer)]
    assert before == after


@every
def test_state_is_a_flat_dict_of_tensors(name: str) -> None:
    optimizer = CASES[name](parameters())
    run_steps(optimizer, range(2))
    for p in params_of(optimizer):
        for key, value in optimizer.state[p].items():
            assert type(key) is str
            assert type(value) is Tensor
            assert not value.requires_grad
            assert value.untyped_storage().nbytes() == value.nbytes, "a view keeps more alive than itself"
    settings = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    assert all(type(value) in (int, float, bool, str, tuple, type(None)) for value in settings)


@every
@pytest.mark.parametrize("shape", SHAPES)
def test_state_bytes_match_the_formula(name: str, shape: str) -> None:
    p = nn.Parameter(random(SHAPES[shape]))
    optimizer = CASES[name]([p])
    run_steps(optimizer, range(2))
    assert sum(tensor.nbytes for tensor in optimizer.state[p].values()) == CASES[name].bytes_of(SHAPES[shape])


@every_low_rank
@pytest.mark.parametrize("shape", [*SHAPES.values(), (300, 700), (4096,), (2, 90, 70), (64, 16, 3, 3)], ids=str)
def test_state_bytes_are_known_before_the_first_step(name: str, shape: tuple[int, ...]) -> None:
    """By arithmetic, and as tensors on the meta device."""
    p = nn.Parameter(torch.empty(shape, device="meta"))
    optimizer = LOW_RANK[name]([p])
    state = optimizer.state[p]
    assert sum(tensor.nbytes for tensor in state.values()) == optimizer.state_bytes(p) == LOW_RANK[name].bytes_of(shape)
    assert all(tensor.is_meta or tensor.numel() == 1 for tensor in state.values())


@every_low_rank
def test_state_bytes_of_a_huge_meta_parameter(name: str) -> None:
    """A matrix of 2^50 numbers."""
    p = nn.Parameter(torch.empty(1 << 25, 1 << 25, device="meta"))
    optimizer = LOW_RANK[name]([p])
    assert optimizer.state_bytes(p) == LOW_RANK[name].bytes_of((1 << 25, 1 << 25))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("muon", "normuon")])
def test_state_is_allocated_at_construction(name: str) -> None:
    optimizer = CASES[name](parameters())
    before = {key: (t.shape, t.dtype) for key, t in snapshot(optimizer).items()}
    run_steps(optimizer, range(8))
    assert {key: (t.shape, t.dtype) for key, t in snapshot(optimizer).items()} == before


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("muon", "normuon")])
def test_reset_restores_the_initial_state(name: str) -> None:
    optimizer = CASES[name](parameters())
    fresh = snapshot(restart(name, optimizer))
    run_steps(optimizer, range(8))
    optimizer.reset()
    kept = {key: value for key, value in snapshot(optimizer).items() if " " in key}
    assert differences(kept, {key: value for key, value in fresh.items() if " " in key}) == []
    again = restart(name, optimizer)
    run_steps(optimizer, range(8))
    run_steps(again, range(8))
    assert differences(snapshot(optimizer), snapshot(again)) == []


@every
def test_deepcopy_is_independent(name: str) -> None:
    """A deep copy of parameters and optimizer together."""
    optimizer = CASES[name](parameters())
    run_steps(optimizer, range(3))
    _, copied = copy.deepcopy((params_of(optimizer), optimizer))
    before = snapshot(optimizer)
    run_steps(copied, range(3, 9))
    assert differences(before, snapshot(optimizer)) == []
    run_steps(optimizer, range(3, 9))
    assert differences(snapshot(copied), snapshot(optimizer)) == []


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("muon", "normuon")])
def test_group_added_later_uses_its_own_options(name: str) -> None:
    """With the options of the group."""
    params = parameters()
    optimizer = CASES[name](params[:2])
    run_steps(optimizer, range(2))
    optimizer.add_param_group({"params": params[2:], "lr": 0.0, "weight_decay": 0.0})
    before = snapshot(optimizer)
    run_steps(optimizer, range(2, 5))
    after = snapshot(optimizer)
    assert not torch.equal(before["0"], after["0"])
    assert all(torch.equal(before[str(index)], after[str(index)]) for index in range(2, len(params)))
    assert all(int(optimizer.state[p]["step"]) == 3 for p in params[2:]) or optimizer.defaults.get("start") == "random"


OTHERS = {
    "another rank": ({"rank": 4}, {"rank": 2}),
    "no subspace": ({"rank": 4}, {}),
    "another store": ({"store": "int8"}, {"store": "fp32"}),
    "another rule of the same moments": ({"rule": "sgd"}, {"rule": "lion"}),
    "another side of a square": ({"rank": 4, "side": "right"}, {"rank": 4, "side": "left"}),
    "another back projection": ({"rank": 4, "back_projection": "fira"}, {"rank": 4}),
}


@pytest.mark.parametrize("which", OTHERS)
def test_mismatched_state_is_rejected_without_changes(which: str) -> None:
    saved_options, options = OTHERS[which]
    saved, optimizer = (
        LowRankOptimizer([nn.Parameter(random((64, 64)))], **settings) for settings in (saved_options, options)
    )
    run_steps(saved, range(2))
    run_steps(optimizer, range(1))
    before = snapshot(optimizer)
    with pytest.raises(OptimizerError, match="expected a saved state"):
        optimizer.load_state_dict(saved.state_dict())
    assert differences(before, snapshot(optimizer)) == []
    assert all(optimizer.param_groups[0][key] == value for key, value in options.items())


@pytest.mark.parametrize(
    ("saved", "current", "message"),
    [("fira", "galore", "without length"), ("galore", "fira", "with length .* got none")],
)
def test_missing_and_unexpected_tensors_are_named(saved: str, current: str, message: str) -> None:
    first, second = (
        LowRankOptimizer([nn.Parameter(random((64, 64)))], rank=4, back_projection=kind) for kind in (saved, current)
    )
    with pytest.raises(OptimizerError, match=message):
        second.load_state_dict(first.state_dict())


def test_state_of_other_parameters_is_rejected() -> None:
    optimizer = LowRankOptimizer([nn.Parameter(random((8, 8)))])
    with pytest.raises(OptimizerError, match=r"expected a saved state with groups of \[1\]"):
        optimizer.load_state_dict(LowRankOptimizer([nn.Parameter(random((8, 8))) for _ in range(2)]).state_dict())


def test_codes_and_scales_share_the_first_dimension() -> None:
    """So that rows can be sharded."""
    p = nn.Parameter(random((96, 600)))
    optimizer = LOW_RANK["adamw8bit"]([p])
    state = optimizer.state[p]
    for key in ("exp_avg", "exp_avg_sq"):
        assert state[key].shape == (96, 600)
        assert state[key + "_scale"].shape == (96, math.ceil(600 / 256))
